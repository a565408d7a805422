"""The replicas' side of an update while the trainer sends: it runs aside, and its first failure reaches the sender."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from dovetail.errors import CalledOffError
from dovetail.interfaces import Logger
from dovetail_rollouts.replica_states import ReplicaFault, describe


class FirstFailure:
    """Notifies the sender once, when the first replica fails while others wait for it.

    Who failed because the update had been called off is not the first: a process of another replica was.

    Args:
        tell: notifies the sender, with the reason.
        logger: logs a failure of `tell`.
    """

    def __init__(self, tell: Callable[[str], None], logger: Logger) -> None:
        self._tell, self._logger = tell, logger
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def heard(self, error: Exception) -> None:
        """Record that a replica has failed. Called from several threads."""
        if isinstance(error, CalledOffError):
            return
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        try:
            self._tell(describe(error))
        except Exception as failed:  # noqa: BLE001 - what the replica says counts, not this
            # The sender goes on to wait as long as its transport lets it.
            self._logger.warning("weight_sender_not_told", error=describe(failed))

    def causes(self, faults: Sequence[ReplicaFault]) -> tuple[ReplicaFault, ...]:
        """Return the faults that came first, where known, since the others are their consequences; else all."""
        found = tuple(f for f in faults if f.error is self._error or f.dead)
        return found or tuple(faults)
