"""Ctrl-C, SIGTERM and SIGHUP as a request to stop: generation ends, or the running stage completes; a second Ctrl-C stops at once.

A second SIGTERM has no effect: schedulers send another one at the end of their grace period.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from dovetail.errors import StopRequested


class StopSwitch:
    """Flag, set by signals, that a run checks between phases.

    A context manager that sets signal handlers in the main thread. In any other thread, which can't set handlers, entering and leaving have
    no effect.
    """

    def __init__(self) -> None:
        self._requested: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # nohup ignores SIGHUP, so that a run outlives its terminal.
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def request(self, reason: str) -> None:
        """Request a stop: generation ends at once, a running stage completes first."""
        self._requested = reason

    def check(self) -> None:
        """Raise StopRequested if a stop was requested."""
        if self._requested is not None:
            stopped = StopRequested(f"stopped by {self._requested}")
            stopped.exit_code = 128 + signal.Signals.__members__.get(self._requested, signal.SIGINT)
            raise stopped

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._requested is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt(f"{name} again: the run stops at once and saves nothing")
            return
        self.request(name)
        # The handler may interrupt a print, which is not reentrant: write to the file descriptor.
        with suppress(OSError):  # after SIGHUP the terminal is gone
            os.write(2, b"\nstopping, and saving; Ctrl-C now stops at once\n")
