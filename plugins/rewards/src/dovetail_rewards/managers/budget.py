"""A budget of the requests and tokens that a service allows in any minute, shared by all callers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import attrs

LONGEST_NAP = 0.5
"""Maximum seconds between two checks of the budget by a waiting call, since charges may be corrected while it waits."""


@attrs.define(eq=False)
class Spending:
    """The charge for one request: the time of its start, by the budget's clock, and its number of tokens."""

    at: float
    tokens: float


class Budget:
    """Limits the requests and tokens in any period of `window` seconds. Requests wait in order of arrival until they fit the limits.

    A request with more tokens than the whole budget starts when the last `window` seconds had no other request.

    Args:
        requests_per_minute: the limit of requests; None for no limit.
        tokens_per_minute: the limit of tokens; None for no limit.
        window: the period in seconds. The limits per minute are scaled to this period; at least one request is allowed in it.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        requests_per_minute: float | None,
        tokens_per_minute: float | None,
        *,
        window: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        share = window / 60.0
        self._requests = (
            None if requests_per_minute is None else max(requests_per_minute * share, 1)
        )
        self._tokens = None if tokens_per_minute is None else tokens_per_minute * share
        self._window = window
        self._clock = clock
        self._spent: deque[Spending] = deque()
        self._turn: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def spend(self, tokens: float) -> Spending:
        """Wait until a request of `tokens` tokens fits the budget, and return its charge, which the caller may correct later."""
        if self._requests is None and self._tokens is None:
            return Spending(self._clock(), tokens)
        async with self._queue():
            while (nap := self.wait(tokens)) > 0:
                await asyncio.sleep(min(nap, LONGEST_NAP))
            spending = Spending(self._clock(), tokens)
            self._spent.append(spending)
            return spending

    def wait(self, tokens: float) -> float:
        """Return the seconds until a request of `tokens` tokens fits the budget; 0 if the request fits now."""
        now = self._clock()
        while self._spent and self._spent[0].at <= now - self._window:
            self._spent.popleft()
        count = len(self._spent)
        held = sum(spending.tokens for spending in self._spent)
        for spending in self._spent:
            if self._fits(count, held, tokens):
                break
            count, held = count - 1, held - spending.tokens
        freed = len(self._spent) - count
        if not freed:
            return 0.0
        return max(self._spent[freed - 1].at + self._window - now, 1e-3)

    def _fits(self, count: int, held: float, tokens: float) -> bool:
        if not count:
            return True
        if self._requests is not None and count + 1 > self._requests:
            return False
        return self._tokens is None or held + tokens <= self._tokens

    def _queue(self) -> asyncio.Lock:
        """Return the lock on which requests queue; create a new lock if the running event loop has changed."""
        loop = asyncio.get_running_loop()
        if self._turn is None or self._loop is not loop:
            self._turn, self._loop = asyncio.Lock(), loop
        return self._turn
