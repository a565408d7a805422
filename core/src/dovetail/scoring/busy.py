"""BusyTime: seconds in which at least one of several things was under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self


class BusyTime:
    """A context manager that may be entered many times at once, on one event loop.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entered, self._since, self._before = 0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """In which it was entered at least once, up to now."""
        return self._before + (self._clock() - self._since if self._entered else 0.0)

    def __enter__(self) -> Self:
        if not self._entered:
            self._since = self._clock()
        self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if not self._entered:
            self._before += self._clock() - self._since
