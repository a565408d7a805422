"""`os._exit` in a file that a config names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LOAD = """
import os, sys
from dovetail.errors import PluginBrokenError
from dovetail.plugins.files import load_file_attribute
try:
    load_file_attribute(sys.argv[1], "f")
except PluginBrokenError as error:
    print(error)
    sys.exit(7)
os._exit(8)
"""


def loaded(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOAD, str(file)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_a_file_that_exits_while_it_is_run_is_one_error_and_not_the_end_of_the_command(
    tmp_path,
) -> None:
    file = tmp_path / "reward.py"
    file.write_text("import os\ndef f(): return 1\nos._exit(0)\n")
    ended = loaded(file)
    assert ended.returncode == 7
    assert "reward.py:3 fails: RuntimeError: os._exit(0)" in ended.stdout


def test_a_process_that_the_file_forks_exits_as_ever(tmp_path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(
        "import os\nif (child := os.fork()) == 0:\n    os._exit(3)\n"
        "assert os.waitpid(child, 0)[1] == 3 << 8\ndef f(): return 1\n"
    )
    ended = loaded(file)
    assert ended.returncode == 8
