"""Future: the result of a call on a worker group, which may still run."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Future(Generic[T]):
    """The result of a call that may still run.

    A runtime makes a future from a function that waits. The result or error is kept after the first wait.
    """

    def __init__(
        self,
        wait: Callable[[float | None], T],
        *,
        done: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wrap a function that waits for a result.

        Args:
            wait: a function of the seconds to wait (None: for ever) that returns the result, or raises its error or TimeoutError.
            done: a function that returns whether `wait` would return at once.
        """
        self._wait = wait
        self._is_done = done
        self._outcome: tuple[T] | Exception | None = None
        self._unseen = False

    @classmethod
    def completed(cls, value: T) -> Future[T]:
        """Return a finished future with this result."""
        return cls(lambda _: value, done=lambda: True)

    @classmethod
    def failed(cls, error: Exception) -> Future[T]:
        """Return a future that has failed: `result` raises the error, which is logged if `result` is never called."""

        def wait(_: float | None) -> T:
            raise error

        future = cls(wait, done=lambda: True)
        future._outcome, future._unseen = error, True
        return future

    @classmethod
    def in_thread(cls, call: Callable[[], T], name: str) -> Future[T]:
        """Start a call in a daemon thread, and return a future of its result.

        Args:
            call: the function to run.
            name: the name of the thread.
        """
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                outcome.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                outcome.set_exception(error)

        threading.Thread(target=run, name=name, daemon=True).start()
        return cls(outcome.result, done=outcome.done)

    def done(self) -> bool:
        """Return whether `result` would return or raise at once."""
        return self._outcome is not None or self._is_done()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: seconds to wait; None waits for ever.

        Raises:
            TimeoutError: the result is not available in time; `result` may be called again.
            WorkerError: a worker failed; Dovetail's own errors keep their type.
        """
        self._unseen = False
        if self._outcome is None:
            self._outcome = self._wait_once(timeout)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome[0]

    def _wait_once(self, timeout: float | None) -> tuple[T] | Exception:
        try:
            return (self._wait(timeout),)
        except (TimeoutError, KeyboardInterrupt):
            raise  # the call itself may still succeed
        except Exception as error:  # noqa: BLE001 - kept, and raised by every `result`
            return error

    def then(self, convert: Callable[[T], U]) -> Future[U]:
        """Return a future of the converted result. `convert` runs once: now if the result is available, else at the first `result`.

        If the call has already failed and `result` of the new future is never called, the error is logged.
        """
        converted = Future(lambda timeout: convert(self.result(timeout)), done=self.done)
        if self.done():
            converted._outcome = converted._wait_once(None)
            converted._unseen = isinstance(converted._outcome, Exception)
        return converted

    def __del__(self) -> None:
        if getattr(self, "_unseen", False):
            logging.getLogger("dovetail").error(
                "a call on a worker group failed, and its result was never asked for: %s",
                self._outcome,
            )
