"""Daemon threads for functions that may hang: a hung one is left behind and replaced, within a bound."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

Outcome = tuple[Any, Exception | None]


class TooManyHungError(RuntimeError):
    """As many calls hang as may; no further one is begun."""


class HungCalls:
    """Counts the calls that were given up while their code still runs; shared by threads and loops."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """Calls hanging now."""
        return self._count

    def add(self, change: int) -> None:
        """A call began to hang (1), or came back after all (-1)."""
        with self._lock:
            self._count += change

    def check(self) -> None:
        """Raise TooManyHungError at the limit."""
        if self._count >= self._limit:
            raise TooManyHungError(
                f"{self._count} reward calls still hang in their threads, and "
                f"reward.manager.max_hung={self._limit} allows no more; reward.manager=parallel kills such calls"
            )


class DaemonThreads:
    """Runs calls in threads that end with the process, unlike those of concurrent.futures.

    Python cannot stop a thread. A call that is cancelled keeps its thread, which ends when the call returns.
    """

    def __init__(self, hung: HungCalls) -> None:
        self._hung = hung
        self._idle: list[_Thread] = []

    async def run(self, call: Callable[[], Any]) -> Any:
        """The call's result, or its exception; cancellation leaves the call behind.

        Raises:
            TooManyHungError: the bound of hung calls is reached.
        """
        self._hung.check()
        thread = self._idle.pop() if self._idle else _Thread(self._hung)
        job = _Job(call, asyncio.get_running_loop())
        thread.jobs.put(job)
        try:
            result, error = await job.future
        except asyncio.CancelledError:
            if not job.leave(self._hung):
                self._idle.append(thread)
            raise
        self._idle.append(thread)
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End the idle threads; hung ones end with their call or with the process."""
        while self._idle:
            self._idle.pop().jobs.put(None)


class _Job:
    """One call, and who waits for it."""

    def __init__(self, call: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Outcome] = loop.create_future()
        self._call = call
        self._loop = loop
        self._lock = threading.Lock()
        self._left = False
        self._returned = False

    def leave(self, hung: HungCalls) -> bool:
        """Give the call up; False where it has just returned, so that its thread is free."""
        with self._lock:
            if self._returned:
                return False
            self._left = True
            hung.add(1)
            return True

    def work(self, hung: HungCalls) -> bool:
        """In the thread: make the call and answer; False where nobody waits any more."""
        outcome = _outcome(self._call)
        with self._lock:
            self._returned = True
            if self._left:
                hung.add(-1)
                return False
        with contextlib.suppress(RuntimeError):  # the loop was closed, and with it who waits
            self._loop.call_soon_threadsafe(self._answer, outcome)
        return True

    def _answer(self, outcome: Outcome) -> None:
        if not self.future.done():
            self.future.set_result(outcome)


class _Thread:
    """One daemon thread and its queue; None ends it."""

    def __init__(self, hung: HungCalls) -> None:
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._hung = hung
        threading.Thread(target=self._work, name="dovetail-reward", daemon=True).start()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            if not job.work(self._hung):
                return


def _outcome(call: Callable[[], Any]) -> Outcome:
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 - handed to the waiter, whatever it is
        return None, as_exception(error)


def as_exception(error: BaseException) -> Exception:
    """An error that a coroutine can raise: SystemExit and its like must not pass for the run's own end."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"the function raised {type(error).__name__}({error})")
    return wrapped.with_traceback(error.__traceback__)
