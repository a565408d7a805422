"""The replicas' side of an update while the trainer sends: it runs aside, and its first failure reaches the sender."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from dovetail.errors import CalledOffError
from dovetail.experience.pool_members import ReplicaFault, in_words
from dovetail.interfaces.plugin import Logger


class FirstFailure:
    """The first replica that fails while others wait for the sender: the sender hears of it, once.

    Who failed because the update had been called off is not the first: a process of another replica was.

    Args:
        tell: tells the sender why.
        logger: told where that fails.
    """

    def __init__(self, tell: Callable[[str], None], logger: Logger) -> None:
        self._tell, self._logger = tell, logger
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def heard(self, error: Exception) -> None:
        """A replica has failed. Called from several threads."""
        if isinstance(error, CalledOffError):
            return
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        try:
            self._tell(in_words(error))
        except Exception as failed:  # noqa: BLE001 - what the replica says counts, not this
            # The sender goes on to wait as long as its transport lets it.
            self._logger.warning("weight_sender_not_told", error=in_words(failed))

    def causes(self, faults: Sequence[ReplicaFault]) -> tuple[ReplicaFault, ...]:
        """The faults that were there first: the others came of them."""
        found = tuple(f for f in faults if f.error is self._error or f.dead)
        return found or tuple(faults)


class BackgroundCall:
    """A call in a thread that does not keep the process from ending."""

    def __init__(self, call: Callable[[], Iterable[ReplicaFault]]) -> None:
        self._outcome: tuple[ReplicaFault, ...] | BaseException = ()
        self._over = threading.Event()

        def run() -> None:
            try:
                self._outcome = tuple(call())
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                self._outcome = error
            finally:
                self._over.set()

        threading.Thread(target=run, name="dovetail-receive-weights", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether it is over within so long."""
        return self._over.wait(seconds)

    def result(self) -> tuple[ReplicaFault, ...]:
        """Wait for what it returns, or raise what it raised."""
        self._over.wait()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome
