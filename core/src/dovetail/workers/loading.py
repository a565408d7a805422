"""Who takes memory of an accelerator while others measure what is free: one after the other, across processes.

A run that starts an engine while its training models load holds the turn. Processes of such an engine import what they need
meanwhile, and wait for the turn before they look at the accelerator. The system ends a turn whose holder dies. On a file
system without locks there are no turns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dovetail.file_locks import lock, unlock

_NAME = "loading.turn"


def turn_path(run_directory: Path) -> Path:
    """Return the lock file of the turn to load in which a run's processes take part; absent while no process holds the turn."""
    return run_directory / _NAME


@contextmanager
def loading_turn(run_directory: Path) -> Iterator[bool]:
    """Hold the run's turn to load models. One thread of one process holds it at a time.

    Yields:
        Whether it is held: false on a file system without locks, where no turn can be taken.
    """
    path = turn_path(run_directory)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    held = False
    try:
        held = bool(lock(file, wait=True))
        yield held
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
        if held:
            unlock(file)
        os.close(file)


def await_turn(path: Path) -> None:
    """Wait until no process holds the turn with this file; return at once without such a file, or without file locks."""
    try:
        waiting = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        lock(waiting, shared=True, wait=True)
    finally:
        os.close(waiting)
