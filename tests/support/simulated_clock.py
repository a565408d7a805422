"""A simulated clock for the loop of the rollout service: latencies of seconds take no time, and a schedule is the same each time.

It moves on to the loop's next timer only while somebody waits for the loop.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from dovetail.workers import loop_thread


class _Jumps(selectors.DefaultSelector):
    """Moves the clock on instead of sleeping, where somebody waits for the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.waiting = 0.0, 0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if found := super().select(0):
            return found
        if not self.waiting:
            return super().select(None)
        self.now += timeout
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop on the clock."""

    def __init__(self) -> None:
        self.clock = _Jumps()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


class SimulatedThread(loop_thread.LoopThread):
    """Counts who waits for the loop; the clock stands still while nobody does."""

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        clock = self._loop.clock  # type: ignore[attr-defined]

        async def counted() -> Any:
            clock.waiting += 1
            try:
                return await work
            finally:
                clock.waiting -= 1

        return super().start(counted())


def simulate_clock(monkeypatch: Any) -> None:
    """Give every rollout service that is made from now on such a loop."""
    monkeypatch.setattr(loop_thread, "_new_loop", SimulatedLoop)
    monkeypatch.setattr("dovetail_rollouts.rollout_service.LoopThread", SimulatedThread)
