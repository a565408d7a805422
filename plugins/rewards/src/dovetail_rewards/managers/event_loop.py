"""A persistent event loop for async reward functions, on its own thread; a blocked loop is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from dovetail.interfaces import contain_tasks, contained
from dovetail_rewards.managers.threads import HungCalls, Outcome

BLOCKED_AFTER = 0.5
"""Seconds without a response after which an event loop counts as blocked."""


class AsyncLane:
    """Runs awaitables on an event loop in a separate thread, so that a blocking awaitable can't stop generation.

    The event loop outlives the caller's loop, so that clients that a function keeps between calls stay usable.
    """

    def __init__(self, hung: HungCalls) -> None:
        self._hung = hung
        self._loop: _LoopThread | None = None
        self._replaced: list[_LoopThread] = []

    async def run(self, awaitable: Awaitable[Any]) -> Any:
        """Return the awaitable's result, or raise its exception; cancelling this call cancels the awaitable.

        Raises:
            TooManyHungError: the limit of hung calls is reached.
        """
        if self._loop is not None and self._loop.blocked:
            self._loop.retire()  # end the loop if it ever unblocks
            self._replaced = [one for one in self._replaced if not one.loop.is_closed()]
            self._replaced.append(self._loop)
            self._loop = None
        self._hung.check()
        self._loop = self._loop or _LoopThread(self._hung)
        loop = self._loop
        future = asyncio.run_coroutine_threadsafe(_awaited(awaitable), loop.loop)
        try:
            result, error = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            loop.ask()
            raise
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End the event loop and the blocked loops that it replaced; safe to call twice."""
        for one in (*self._replaced, self._loop):
            if one is not None:
                one.stop()
        self._replaced, self._loop = [], None


class _LoopThread:
    """An event loop on its own thread, with a check whether it still responds."""

    def __init__(self, hung: HungCalls) -> None:
        self.loop = asyncio.new_event_loop()
        contain_tasks(self.loop)
        self._hung = hung
        self._lock = threading.Lock()
        self._asked: float | None = None
        self._ending = False
        threading.Thread(target=self._work, name="dovetail-reward-loop", daemon=True).start()

    @property
    def blocked(self) -> bool:
        """Whether the loop has not answered a ping in time."""
        asked = self._asked
        return asked is not None and time.monotonic() - asked > BLOCKED_AFTER

    def ask(self) -> None:
        """Ping the loop after a call was cancelled. Until the loop answers, `HungCalls` counts one more hung call."""
        with self._lock:
            if self._asked is not None or self.loop.is_closed():
                return
            self._asked = time.monotonic()
            self._hung.add(1)
        self.loop.call_soon_threadsafe(self._answer)

    def stop(self) -> None:
        """End the loop as soon as no task blocks it, and cancel its unfinished tasks."""
        self._soon(self.loop.stop)

    def retire(self) -> None:
        """End the loop after its tasks have ended, so that calls still complete on a loop that was slow but not blocked for ever."""
        self._soon(self._stop_after_all)

    def _soon(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self.loop.call_soon_threadsafe(act)

    def _stop_after_all(self) -> None:
        running = asyncio.gather(*asyncio.all_tasks(self.loop), return_exceptions=True)
        running.add_done_callback(lambda _: None if self._ending else self.loop.stop())

    def _answer(self) -> None:
        with self._lock:
            self._asked = None
            self._hung.add(-1)

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self._ending = True
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self.loop.close()


async def _awaited(awaitable: Awaitable[Any]) -> Outcome:
    """Wait for an awaitable, and return `(result, None)`, or `(None, error)` if it raises.

    The error is returned as a value, because the exception of a future may change its type or traceback.
    """
    try:
        return await contained(awaitable), None
    except Exception as error:  # noqa: BLE001 - handed to the waiter, whatever it is
        return None, error
