"""BusyTime: seconds in which at least one of several things was under way, and seconds of them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self


class BusyTime:
    """A context manager that may be entered many times at once, on one event loop.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entered, self._since, self._seconds, self._total = 0, 0.0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """In which it was entered at least once, up to now."""
        self.add(0)
        return self._seconds

    @property
    def total(self) -> float:
        """As `seconds`, but counted as often as it was entered."""
        self.add(0)
        return self._total

    def add(self, count: int) -> None:
        """Enter it so many times, or leave it so many times where the count is negative."""
        now = self._clock()
        self._seconds += (now - self._since) * (self._entered > 0)
        self._total += (now - self._since) * self._entered
        self._since = now
        self._entered += count

    @contextmanager
    def left(self) -> Iterator[None]:
        """Leave it once in the block."""
        self.add(-1)
        try:
            yield
        finally:
            self.add(1)

    def __enter__(self) -> Self:
        self.add(1)
        return self

    def __exit__(self, *_: object) -> None:
        self.add(-1)
