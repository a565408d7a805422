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
    """Runs commands as child processes. Records Ctrl-C, SIGTERM and SIGHUP and forwards them to the child, which then saves its run.

    The child has its own process group. Otherwise a terminal's Ctrl-C would reach the child twice, and the second signal would stop the
    child without saving.
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
        """Run a command and return its exit code, negative if a signal killed the command."""
        sys.stdout.flush()
        # No terminal as input: reading it would stop the child's process group, which is in the background.
        apart: dict[str, Any] = {"process_group": 0, "stdin": subprocess.DEVNULL, "env": env}
        with subprocess.Popen(command, **apart) as self._running:  # noqa: S603 - this command, on the caller's arguments
            if self.received is not None:  # received during the start
                self._running.send_signal(self.received)
            return self._running.wait()

    def pause(self, seconds: float) -> bool:
        """Wait `seconds`, or until a signal requests a stop; return whether a stop was requested."""
        return self._stopped.wait(seconds)

    def _receive(self, number: int, _frame: object) -> None:
        self.received = signal.Signals(number)
        self._stopped.set()
        if self._running is not None:
            self._running.send_signal(number)
