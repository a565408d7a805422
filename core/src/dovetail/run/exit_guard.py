"""`os._exit` in code of the user that runs in the run's own process: it would end the run with nothing saved, and with status 0."""

from __future__ import annotations

import os
import threading
from typing import NoReturn

_exit = os._exit
_process = os.getpid()


def guard_exit() -> None:
    """Replace `os._exit` in this process, for good: in threads other than the main one it raises RuntimeError.

    To be called before the first file of the user is run, which may keep what it finds. Reward functions never run in the main
    thread. A process that is forked from this one exits as ever.
    """
    global _process  # noqa: PLW0603 - of the process that calls
    import posix

    _process = os.getpid()
    os._exit = posix._exit = _refuse  # noqa: SLF001 - their names


def _refuse(status: int) -> NoReturn:
    if os.getpid() == _process and threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"os._exit({status}) would end the whole run; return a score or raise an error, "
            "or run such code in processes of its own (reward.manager=parallel)"
        )
    _exit(status)
