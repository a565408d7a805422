"""ReplicaState: the state of a replica's weights, and its transitions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum

import attrs

from dovetail.errors import RolloutError
from dovetail.interfaces import BaseRollout


class ReplicaState(StrEnum):
    """The state of a replica's weights. Only a `current` replica gets requests.

    A dead replica is detected when its requests fail, or by the next update, which checks every replica. Draining and freed memory are
    independent of this state: a draining replica can be behind, or fail.
    """

    STARTING = "starting"
    """The replica was added, and has not received a verified update."""
    BEHIND = "behind"
    """Other replicas of the pool hold newer weights."""
    RECEIVING = "receiving"
    """The replica is receiving an update."""
    CURRENT = "current"
    """The replica holds the current weights."""
    FAILED = "failed"
    """The replica failed, and gets no requests until it is restarted or has received a complete update."""
    GONE = "gone"
    """The replica has left the pool and is closed."""


@attrs.define(eq=False)
class Replica:
    """A replica and its state in the pool."""

    engine: BaseRollout
    number: int
    state: ReplicaState = ReplicaState.CURRENT
    version: int | None = None
    """Version of the weights that the replica received last; None before the first update."""
    fault: Exception | None = None
    """The error with which the replica failed; None if it has not failed."""
    draining: bool = False
    """Whether the replica gets no more requests, and leaves the pool at the next weight update."""
    asleep: frozenset[str] = frozenset()
    """Tags of the memory that the replica has freed."""
    outstanding: int = 0
    """The load of the requests in flight: the tokens of their prompts, plus the token limit of every response that has not finished."""
    requests: set[str] = attrs.field(factory=set)
    """Ids of the requests in flight; a retry keeps the id with which the request was submitted to the pool."""
    idle: asyncio.Event = attrs.field(factory=asyncio.Event)
    """An event that is set while no request is in flight."""
    failures: int = 0
    """The number of failures since the last success; requests that fail together count once."""
    incidents: int = 0
    """The number of failures over the whole run, counted as in `failures`."""
    last_error: Exception | None = None
    """The error of the replica's latest failed request."""
    address: str | None = None
    """URL of the server that the replica joined, if it was started by hand."""
    reopen: Callable[[], BaseRollout] | None = None
    """A function that joins the server again; None if the pool's `restart` restarts the replica."""
    joined: Future[int] | None = None
    """A future with the version of the replica's first weights, or the error with which the replica was rejected. None if the replica
    started with the run."""

    @property
    def joining(self) -> bool:
        """Whether the replica was added during the run and has not yet received an update."""
        return self.joined is not None and not self.joined.done()

    @property
    def usable(self) -> bool:
        """Whether the replica may get requests."""
        return self.state is ReplicaState.CURRENT and not self.draining

    def fail(self, error: Exception) -> None:
        """Mark the replica as failed, so that it gets no requests; the first reason is kept."""
        self.state, self.fault = ReplicaState.FAILED, self.fault or error

    def took(self, version: int) -> None:
        """Record that the replica has completely received this version of the weights."""
        self.state = ReplicaState.STARTING if self.joining else ReplicaState.CURRENT
        self.version, self.fault, self.failures = version, None, 0

    def welcome(self, version: int) -> None:
        """Record that an added replica has received its first update, and gets requests from now on."""
        self.state = ReplicaState.CURRENT
        if self.joined is not None:
            self.joined.set_result(version)

    def leave(self, error: Exception | None = None) -> None:
        """Close a replica that leaves the pool; `error` is the reason if an added replica was rejected."""
        self.state = ReplicaState.GONE
        if error is not None and self.joined is not None and self.joining:
            self.joined.set_exception(error)
        close(self.engine)

    def request_failed(self, error: RolloutError, *, most: int, counted: bool) -> None:
        """Record a failed request, and mark the replica as failed after `most` failures in a row.

        Args:
            error: the error of the request.
            most: the number of consecutive failures after which the replica counts as failed.
            counted: whether the request belongs to a failure of several requests that was counted already.
        """
        self.last_error = error
        if counted:
            return
        self.failures += 1
        self.incidents += 1
        if self.failures >= most:
            text = f"{self.failures} requests in a row failed: {describe(error)}"
            self.fail(RolloutError(text))


@attrs.frozen(kw_only=True)
class ReplicaFault:
    """A fault of one replica."""

    number: int
    error: Exception
    dead: bool = False
    """Whether the replica no longer answers at all."""

    def __str__(self) -> str:
        return f"replica {self.number}: {describe(self.error)}"


def close(engine: BaseRollout) -> None:
    """Close an engine, and ignore errors, since its process may have ended already."""
    try:
        engine.close()
    except Exception:  # noqa: BLE001 - it is not needed any more
        return


def describe(error: Exception) -> str:
    """Return an error's message, preceded by the error's type if it is not a Dovetail error."""
    message = getattr(error, "message", None)
    return str(message) if message is not None else f"{type(error).__name__}: {error}"
