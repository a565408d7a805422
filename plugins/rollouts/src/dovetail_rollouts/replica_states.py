"""ReplicaState: what a replica of the pool holds, and when that changes."""

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

    A dead replica is detected by failing requests, which other replicas then answer, or by the next update, which checks every replica.
    Draining and freed memory are independent of this state: a draining replica can be behind, or fail.

    A replica that dies is found so by the requests that fail there, which other replicas then answer, or by the next update, which
    asks each whether it lives. Whether it is drained and which memory it has let go are stated apart: a replica that drains can be
    behind, or fail.
    """

    STARTING = "starting"
    """It was added, and no update has been found in it yet."""
    BEHIND = "behind"
    """The pool's other replicas hold weights that it has not got."""
    RECEIVING = "receiving"
    """An update is under way to it."""
    CURRENT = "current"
    """It holds the weights in force."""
    FAILED = "failed"
    """It can't be trusted with requests: only a start or a whole update brings it back."""
    GONE = "gone"
    """It is not a member any more, and closed."""


@attrs.define(eq=False)
class Replica:
    """A replica and its state in the pool."""

    engine: BaseRollout
    number: int
    state: ReplicaState = ReplicaState.CURRENT
    version: int | None = None
    """Version of the weights that it took last; None before the first update."""
    fault: Exception | None = None
    """Why it has failed."""
    draining: bool = False
    """Whether it gets no more requests, and leaves at the next version boundary."""
    asleep: frozenset[str] = frozenset()
    """Tags of the memory that it has let go."""
    outstanding: int = 0
    """Tokens that were asked for and have not come."""
    requests: set[str] = attrs.field(factory=set)
    """Requests in flight, by the id under which the pool was asked."""
    idle: asyncio.Event = attrs.field(factory=asyncio.Event)
    """Set where it has none."""
    failures: int = 0
    """Incidents since the last success, however many requests each of them took down."""
    incidents: int = 0
    """Incidents ever."""
    last_error: Exception | None = None
    """What the latest request that failed there said."""
    address: str | None = None
    """URL of its server, where it joined one that was started by hand."""
    reopen: Callable[[], BaseRollout] | None = None
    """Joins its server again; None where the pool's `restart` brings it back."""
    joined: Future[int] | None = None
    """Set to the version of its first weights, or to the reason why it was turned away; None where it began with the run."""

    @property
    def joining(self) -> bool:
        """Whether it was added during the run and has not yet received an update."""
        return self.joined is not None and not self.joined.done()

    @property
    def usable(self) -> bool:
        """Whether it may get requests."""
        return self.state is ReplicaState.CURRENT and not self.draining

    def fail(self, error: Exception) -> None:
        """Mark it as failed, so that it gets no requests; the first reason is kept."""
        self.state, self.fault = ReplicaState.FAILED, self.fault or error

    def took(self, version: int) -> None:
        """Record that it holds these weights completely."""
        self.state = ReplicaState.STARTING if self.joining else ReplicaState.CURRENT
        self.version, self.fault, self.failures = version, None, 0

    def welcome(self, version: int) -> None:
        """Record that it has received its first update."""
        self.state = ReplicaState.CURRENT
        if self.joined is not None:
            self.joined.set_result(version)

    def leave(self, error: Exception | None = None) -> None:
        """Close it; its server may be gone already. `error` is the reason where an added replica was rejected."""
        self.state = ReplicaState.GONE
        if error is not None and self.joined is not None and self.joining:
            self.joined.set_exception(error)
        close(self.engine)

    def request_failed(self, error: RolloutError, *, most: int, counted: bool) -> None:
        """Record a failed request; after `most` failures in a row the replica has failed.

        Args:
            error: the error of the request.
            most: incidents.
            counted: whether the request went down with others in an incident that is counted already.
        """
        self.last_error = error
        if counted:
            return
        self.failures += 1
        self.incidents += 1
        if self.failures >= most:
            text = f"it failed {self.failures} times in a row: {describe(error)}"
            self.fail(RolloutError(text))


@attrs.frozen(kw_only=True)
class ReplicaFault:
    """A fault of one replica."""

    number: int
    error: Exception
    dead: bool = False
    """Whether it can't even be asked any more."""

    def __str__(self) -> str:
        return f"replica {self.number}: {describe(self.error)}"


def close(engine: BaseRollout) -> None:
    """Close an engine that may be gone already."""
    try:
        engine.close()
    except Exception:  # noqa: BLE001 - it is not needed any more
        return


def describe(error: Exception) -> str:
    """Return an error's message, preceded by the type where it is not an error of Dovetail."""
    message = getattr(error, "message", None)
    return str(message) if message is not None else f"{type(error).__name__}: {error}"
