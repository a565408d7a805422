"""Counters of a server's samples since its start, for engines whose own metrics are not used."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Counters:
    """Counts running samples and other events of a server, under one event loop.

    Args:
        names: the names of the event counters.
    """

    def __init__(self, *names: str) -> None:
        self._totals = dict.fromkeys((*names, "busy_seconds", "sample_seconds"), 0.0)
        self._running, self._most = 0, 0
        self._since = time.monotonic()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a running sample during the `with` block."""
        self._advance()
        self._running += 1
        self._most = max(self._most, self._running)
        try:
            yield
        finally:
            self._advance()
            self._running -= 1

    def add(self, **amounts: float) -> None:
        """Add each amount to the event counter of the same name."""
        for name, amount in amounts.items():
            self._totals[name] += amount

    def totals(self) -> dict[str, float]:
        """Return all totals since the start.

        Returns:
            The event counters by name; `busy_seconds`, the time in which at least one sample ran; `sample_seconds`, the sum of all
            samples' running times; `running_max`, the maximum number of samples that ran at once since the last call.
        """
        self._advance()
        most, self._most = self._most, self._running
        return {**self._totals, "running_max": float(most)}

    def _advance(self) -> None:
        now = time.monotonic()
        if self._running:
            self._totals["busy_seconds"] += now - self._since
            self._totals["sample_seconds"] += self._running * (now - self._since)
        self._since = now
