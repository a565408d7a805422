"""CountedTime: the running time of one try, as whoever enforces its limit counts it."""

from __future__ import annotations

import asyncio

from dovetail.interfaces.reward import RunningTime


class CountedTime(RunningTime):
    """Moves the end of a time-out by as long as the samples wait.

    Args:
        seconds: that the try may run.
        limit: the time-out around it.
    """

    def __init__(self, seconds: float, limit: asyncio.Timeout) -> None:
        super().__init__(seconds)
        self._limit = limit
        self._left: float | None = None

    def stop(self) -> None:
        when = self._limit.when()
        if when is not None and not self._limit.expired():
            self._left = when - asyncio.get_running_loop().time()
            self._limit.reschedule(None)

    def go_on(self) -> None:
        # None where the time-out struck before, and this is the way out of it
        if self._left is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + self._left)
            self._left = None
