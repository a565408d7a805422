"""Guards against `os._exit` in user code in the run's own process, which would end the run with status 0 and nothing saved."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_exit = os._exit
_guarded: int | None = None
"""Id of the process that `guard_exit` guards; forked processes inherit this variable, but are not guarded."""
_here = threading.local()
"""Thread-local. `_here.process` is the process id while the thread runs a user's file, else None."""


def guard_exit() -> None:
    """Replace `os._exit` in this process permanently, so that it raises RuntimeError outside the main thread.

    Call this before the first user file runs, since a file may keep a reference to `os._exit`. Reward functions never run in the
    main thread. In forked processes `os._exit` works as usual.
    """
    global _guarded  # noqa: PLW0603 - of the process that calls
    _replace()
    _guarded = os.getpid()


@contextmanager
def no_exit() -> Iterator[None]:
    """Make `os._exit` raise RuntimeError while a user's file runs."""
    _replace()
    before, _here.process = getattr(_here, "process", None), os.getpid()
    try:
        yield
    finally:
        _here.process = before


def _replace() -> None:
    import posix

    os._exit = posix._exit = _refuse  # noqa: SLF001 - their names


def _refuse(status: int) -> NoReturn:
    process = os.getpid()
    if getattr(_here, "process", None) == process:
        raise RuntimeError(
            f"os._exit({status}) was refused in a plugin's file: it would end the whole command; raise an error instead"
        )
    if _guarded == process and threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"os._exit({status}) was refused: it would end the whole run; return a score or raise an error, "
            "or run such code in separate processes (reward.manager=parallel)"
        )
    _exit(status)
