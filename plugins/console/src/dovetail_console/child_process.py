"""ChildProcess: runs commands as child processes, one after the other, and forwards this process's signals to them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ChildProcess:
    """Runs commands as child processes, passes Ctrl-C, SIGTERM and SIGHUP on to the child, which then saves its run, and records the
    signal.

    The child has a process group of its own: otherwise a terminal's Ctrl-C would reach it twice, and the second one stops it without
    saving.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._stopped = threading.Event()
        self._running: subprocess.Popen[bytes] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # SIG_IGN as under nohup
                self._before[number] = signal.signal(number, self._receive)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def call(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
        """Run a command and return its exit code, which is below 0 where a signal killed it."""
        sys.stdout.flush()
        # No terminal as input: reading it would stop the child's process group, which is in the background.
        apart: dict[str, Any] = {"process_group": 0, "stdin": subprocess.DEVNULL, "env": env}
        with subprocess.Popen(command, **apart) as self._running:  # noqa: S603 - this command, on the caller's arguments
            if self.received is not None:  # received during the start
                self._running.send_signal(self.received)
            return self._running.wait()

    def pause(self, seconds: float) -> bool:
        """Wait `seconds`, or until a signal requests a stop; return whether one does."""
        return self._stopped.wait(seconds)

    def _receive(self, number: int, _frame: object) -> None:
        self.received = signal.Signals(number)
        self._stopped.set()
        if self._running is not None:
            self._running.send_signal(number)
