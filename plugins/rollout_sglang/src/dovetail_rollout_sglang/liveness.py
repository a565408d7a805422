"""Liveness: whether a server's processes still run, which a response of its HTTP process does not show."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

_PATIENCE = 10.0
"""Seconds for which a process may be stopped; a debugger that inspects it stops it for less."""


class Liveness:
    """Finds processes of a server that a signal (SIGSTOP) has stopped for too long, which SGLang does not notice.

    Args:
        stopped: a function that returns the ids of stopped processes; None checks the descendants of this process.
        patience: seconds after which a stopped process counts as lost.
        clock: a function that returns the time in seconds.
    """

    def __init__(
        self,
        stopped: Callable[[], Iterable[int]] | None = None,
        *,
        patience: float = _PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stopped = stopped or stopped_descendants
        self._patience, self._clock = patience, clock
        self._since: dict[int, float] = {}
        self._looked = clock()

    def lost(self) -> str | None:
        """Return a text that names the processes that have been stopped for `patience` seconds or longer; None if there are none.

        A process counts as stopped during a time if every call of this method in that time found it stopped.
        """
        now = self._clock()
        if now - self._looked >= self._patience:
            # Without running samples, nothing calls this method: a process may have run between two calls.
            self._since = {}
        self._looked = now
        self._since = {pid: self._since.get(pid, now) for pid in self._stopped()}
        late = [pid for pid, since in self._since.items() if now - since >= self._patience]
        if not late:
            return None
        named = ", ".join(map(str, sorted(late)))
        return f"a signal has stopped SGLang's processes {named} for {self._patience:g} s or longer"


def stopped_descendants() -> list[int]:
    """Return the ids of this process's descendants that a signal has stopped."""
    import psutil  # type: ignore[import-untyped]

    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                found.append(process.pid)
    return found
