"""A command that a test has started and that hangs is named, and shows where it hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HANGS = """
import subprocess, sys

def test_it():
    command = [sys.executable, "-c", "import time\\ndef wait(): time.sleep(60)\\nwait()"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
"""


def test_a_command_that_hangs_is_named_with_its_stack(tmp_path: Path, root: Path) -> None:
    (tmp_path / "test_hang.py").write_text(HANGS)
    (tmp_path / "conftest.py").write_text((root / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "--timeout=30", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_it: aborted" in done.stdout
    assert "Fatal Python error: Aborted" in done.stdout
    assert "in wait" in done.stdout
