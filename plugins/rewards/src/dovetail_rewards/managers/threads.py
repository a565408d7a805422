"""Daemon threads for functions that may hang: a hung thread is abandoned and replaced, up to a limit."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Any

from dovetail.interfaces import outcome_of

Outcome = tuple[Any, Exception | None]
_Job = tuple[Callable[[], Any], Future[Outcome]]


class TooManyHungError(RuntimeError):
    """The limit of hanging calls is reached, so no further call is started."""


class HungCalls:
    """Counts calls that timed out but still run. At a limit, no further call is started. Shared by threads and event loops."""

    def __init__(self, limit: float = math.inf) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """The number of calls that currently hang."""
        return self._count

    def add(self, change: int) -> None:
        """Count a call that started to hang (`change` 1) or a hanging call that returned (-1)."""
        with self._lock:
            self._count += change

    def check(self) -> None:
        """Raise TooManyHungError if the limit of hanging calls is reached."""
        if self._count >= self._limit:
            raise TooManyHungError(
                f"the limit of hanging reward calls is reached: {self._count} still run after their time-out "
                f"(reward.manager.max_hung={self._limit}); set reward.manager=parallel, which kills such calls"
            )


class DaemonThreads:
    """Runs calls in daemon threads, unlike concurrent.futures, whose threads are joined at exit.

    Python cannot stop a thread. A cancelled call keeps its thread, which ends when the call returns.
    """

    def __init__(self, hung: HungCalls) -> None:
        self._hung = hung
        self._idle: list[SimpleQueue[_Job | None]] = []

    async def run(self, call: Callable[[], Any]) -> Any:
        """Return the call's result, or raise its exception; cancellation abandons the call.

        Raises:
            TooManyHungError: the limit of hung calls is reached.
        """
        self._hung.check()
        if self._idle:
            jobs = self._idle.pop()
        else:
            jobs = SimpleQueue()
            threading.Thread(
                target=self._work, args=(jobs,), name="dovetail-reward", daemon=True
            ).start()
        future: Future[Outcome] = Future()
        jobs.put((call, future))
        try:
            result, error = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.cancelled():  # the call has not returned, so its thread is abandoned
                self._hung.add(1)
            else:
                self._idle.append(jobs)
            raise
        self._idle.append(jobs)
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End the idle threads; hanging threads end with their call or with the process."""
        while self._idle:
            self._idle.pop().put(None)

    def _work(self, jobs: SimpleQueue[_Job | None]) -> None:
        while (job := jobs.get()) is not None:
            call, future = job
            outcome = outcome_of(call)
            try:
                future.set_result(outcome)
            except InvalidStateError:
                self._hung.add(-1)
                return
            except RuntimeError:  # the event loop of the waiting task was closed
                return
            # Otherwise the idle thread would keep the sample and its outcome in memory.
            del job, call, future, outcome
