"""Lock under which the processes of a run load models one after the other, so that free accelerator memory can be measured.

A run that starts an engine while its training models load holds the lock (the turn to load). The engine's processes import packages
meanwhile, and wait for the lock before they look at the accelerator. The system releases the lock of a process that dies. On a file system
without locks, models are not loaded at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dovetail.file_locks import lock, unlock

_NAME = "loading.turn"


def turn_path(run_directory: Path) -> Path:
    """Return the path of a run's lock file for loading models; the file is absent while no process holds the lock."""
    return run_directory / _NAME


@contextmanager
def loading_turn(run_directory: Path) -> Iterator[bool]:
    """Hold the run's lock for loading models within the block. One thread of one process holds the lock at a time.

    Yields:
        Whether the lock is held; false on a file system without locks.
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
    """Wait until no process holds the lock of this file; return at once if there is no such file, or if the file system has no locks."""
    try:
        waiting = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        lock(waiting, shared=True, wait=True)
    finally:
        os.close(waiting)
