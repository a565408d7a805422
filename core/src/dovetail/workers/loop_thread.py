"""LoopThread: an event loop in its own thread, to which other threads submit coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from dovetail.errors import RolloutError
from dovetail.interfaces.contained import contain_tasks

T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds to wait for the thread to end."""


class LoopThread:
    """A thread that runs an event loop until it is closed.

    Args:
        name: the thread's name.

    Attributes:
        failure: the error that ended the loop before it was closed.
    """

    def __init__(self, name: str) -> None:
        self.failure: BaseException | None = None
        self._loop = _new_loop()
        contain_tasks(self._loop)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread still accepts coroutines."""
        return self.failure is None and self._thread.is_alive()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop; any thread may wait for the future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and await it from another event loop; cancelling the caller cancels the coroutine.

        Raises:
            RolloutError: the loop was closed meanwhile.
        """
        try:
            return await asyncio.wrap_future(self.start(work))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # This task was not cancelled, so the coroutine was: by `close`, in the loop's thread.
            raise RolloutError("the engine was closed during the call") from None

    def wait(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and block until it is done.

        Raises:
            TimeoutError: the coroutine took longer than `timeout` seconds, and is cancelled.
        """
        future = self.start(work)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel the running coroutines and end the thread; safe to call twice.

        A thread that hangs in a blocking call is not ended: it lives until the process exits.
        """
        if not self._thread.is_alive():
            return
        with suppress(RuntimeError):  # the thread has closed the loop since
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            try:
                self._loop.run_forever()
            except BaseException as failure:  # noqa: BLE001 - whoever waits for its work must learn of it
                self.failure = failure
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self._loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's event loop, which is faster and comes with serving engines; without uvloop, the standard one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
