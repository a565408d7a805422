"""Completion in shells, as docs/command-line.md sets it up: a real shell on a pseudo-terminal, and its Tab key."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
SHELLS = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}


class Terminal:
    """A shell in which a person types."""

    def __init__(self, shell: str, folder: Path) -> None:
        self._fd, tail = pty.openpty()
        env = {
            **os.environ,
            "PS1": "$ ",
            "TERM": "dumb",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self.process = subprocess.Popen(
            [shell, *SHELLS[shell]],
            stdin=tail,
            stdout=tail,
            stderr=tail,
            cwd=folder,
            env=env,
            start_new_session=True,
        )
        os.close(tail)

    def type(self, keys: str, expected: str) -> None:
        """Type keys and wait until the terminal shows what is expected after them."""
        os.write(self._fd, keys.encode())
        shown, deadline = "", time.monotonic() + 60
        while not re.search(expected, shown):
            assert time.monotonic() < deadline, shown
            if select.select([self._fd], [], [], 1)[0]:
                shown += os.read(self._fd, 65536).decode(errors="replace")


@pytest.mark.parametrize("shell", list(SHELLS))
def test_tab_completes_commands_options_files_and_keys(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "my_config.yaml").write_text("model: {path: m}\ndata: {train_files: t.jsonl}\n")
    setup = re.search(rf"```{shell}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert setup is not None
    terminal = Terminal(shell, tmp_path)
    try:
        terminal.type(f"{setup[1]}echo re''ady\n", "ready")
        terminal.type("dovetail wat\t", "watch")
        terminal.type("\x15dovetail train --acc\t", r"--accept-changes")
        terminal.type("\x15dovetail train my_c\t", r"my_config\.yaml")
        # No blank separates a key from its value, and one separates what is complete.
        terminal.type("actor.optim.weight_d\t0.5", r"actor\.optim\.weight_decay=0\.5")
        terminal.type("\x15dovetail runs comp\tx", r"dovetail runs compare[ \x08]+x")
        terminal.type("\x15dovetail sweep my_config.yaml trainer.total_s\t", r"total_steps=")
        terminal.type("\x15dovetail chat my_c\t", r"my_config\.yaml")
    finally:
        terminal.process.kill()
        terminal.process.wait()
