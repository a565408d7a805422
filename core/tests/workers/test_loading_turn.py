"""A turn holds other processes back, ends with its block, and with its holder however that ends."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.workers import await_turn, turn_path
from dovetail.workers.loading import loading_turn

WAIT = """
import sys
from pathlib import Path
from dovetail.workers import await_turn
print("waiting", flush=True)
await_turn(Path(sys.argv[1]))
print("after the end" if (Path(sys.argv[1]).parent / "ending").exists() else "before the end", flush=True)
"""
HOLD = """
import os, signal, sys
from pathlib import Path
from dovetail.workers.loading import loading_turn
with loading_turn(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def started(program: str, argument: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(argument)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_where_nobody_holds_a_turn_nobody_waits(tmp_path: Path) -> None:
    await_turn(turn_path(tmp_path))


def test_another_process_waits_for_the_end_of_a_turn(tmp_path: Path) -> None:
    with loading_turn(tmp_path):
        waiting = started(WAIT, turn_path(tmp_path))
        assert line(waiting) == "waiting"
        (tmp_path / "ending").touch()
    assert line(waiting) == "after the end"
    assert waiting.wait(120) == 0


def test_a_holder_that_is_killed_holds_nobody_back(tmp_path: Path) -> None:
    holder = started(HOLD, tmp_path)
    assert line(holder) == "held"
    waiting = started(WAIT, turn_path(tmp_path))
    assert line(waiting) == "waiting"
    (tmp_path / "ending").touch()
    holder.kill()
    holder.wait()
    assert line(waiting) == "after the end"
    assert waiting.wait(120) == 0
    await_turn(turn_path(tmp_path))


def test_on_a_file_system_without_locks_nobody_holds_a_turn_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with loading_turn(tmp_path) as held:
        assert not held
        turn_path(tmp_path).touch()
        await_turn(turn_path(tmp_path))
    assert not turn_path(tmp_path).exists()
