"""Places: slots that limit concurrent calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dovetail.interfaces import RunningTime


class Places:
    """A semaphore that limits concurrent calls. May be used from several event loops, one after another.

    Args:
        count: the maximum number of concurrent calls.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def one(self, time: RunningTime) -> AsyncIterator[None]:
        """Hold one slot during a `with` block; waiting for the slot does not count as running time."""
        loop = asyncio.get_running_loop()
        if self._free is None or self._loop is not loop:
            self._free, self._loop = asyncio.Semaphore(self._count), loop
        free = self._free
        with time.waiting():
            await free.acquire()
        try:
            yield
        finally:
            free.release()
