"""The members of a rollout pool: who takes requests, who has failed, who joins, leaves or starts again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import attrs

from dovetail.errors import RolloutError
from dovetail.interfaces.rollout import BaseRollout

T = TypeVar("T")

Restart = Callable[[BaseRollout], BaseRollout]
"""Closes a replica and starts another in its place: a runtime's `restart_replica`."""


@attrs.define(eq=False)
class Member:
    """A replica and what the pool knows of it."""

    engine: BaseRollout
    number: int
    outstanding: int = 0
    """Tokens that were asked for and have not come."""
    requests: set[str] = attrs.field(factory=set)
    """Requests in flight, by the id under which the pool was asked."""
    failures: int = 0
    """Incidents since the last success, however many requests each of them took down."""
    incidents: int = 0
    """Incidents ever."""
    address: str | None = None
    """URL of its server, where it joined one that was started by hand."""
    reopen: Callable[[], BaseRollout] | None = None
    """Joins its server again; None where the pool's `restart` brings it back."""
    joined: Future[int] | None = None
    """Set to the version of its first weights, or to the reason why it was turned away; None where it began with the pool."""
    draining: bool = False
    """Whether it gets no more requests, and leaves at the next version boundary."""
    version: int | None = None
    """Version of the weights that it holds; None before the first update."""
    behind: bool = False
    """Whether the pool's other replicas hold weights that it has not got yet."""
    last_error: Exception | None = None
    """What the latest request that failed there said."""
    fault: Exception | None = None
    """Why it can't be trusted with requests until it has been mended: it did not take an update, sleep or wake."""
    asleep: frozenset[str] = frozenset()
    """Tags of the memory that it has let go."""
    idle: asyncio.Event = attrs.field(factory=asyncio.Event)

    @property
    def joining(self) -> bool:
        """Whether it was added while the run was under way, and no weights have reached it yet."""
        return self.joined is not None and not self.joined.done()


@attrs.frozen(kw_only=True)
class ReplicaFault:
    """What is wrong with one replica."""

    number: int
    error: Exception
    dead: bool = False
    """Whether it can't even be asked any more."""

    def __str__(self) -> str:
        return f"replica {self.number}: {in_words(self.error)}"


class Members:
    """Replicas by number. A number is given once, and a replica that is started again keeps it.

    Args:
        replicas: started replicas.
        max_failures: a replica that fails so often in a row gets no more requests, until it joins or starts again.
        restart: closes a replica and starts another in its place; None where nobody can.
        addresses: URLs of the servers that the first replicas joined, in their order.

    The thread that sends weights alone changes who is a member, in `settle`, `let_go` and `restart`: all that it does for one
    update is for the same members.
    """

    def __init__(
        self,
        replicas: Iterable[BaseRollout],
        *,
        max_failures: int = 3,
        restart: Restart | None = None,
        addresses: Sequence[str] = (),
    ) -> None:
        self._members: list[Member] = []
        self._added: deque[Member] = deque()
        self._max_failures = max_failures
        self._restart = restart
        self._numbers = 0
        self._version: int | None = None
        for engine in replicas:
            self.join(engine)
        for member, address in zip(self._members, addresses, strict=False):
            member.address = address

    @property
    def replicas(self) -> tuple[BaseRollout, ...]:
        """The replicas that take requests."""
        return tuple(member.engine for member in self._usable())

    @property
    def size(self) -> int:
        """All replicas, those included that take no requests."""
        return len(self._members)

    @property
    def members(self) -> tuple[Member, ...]:
        """All replicas, and those that wait to become one."""
        return (*self._members, *self._added)

    @property
    def staying(self) -> int:
        """All replicas but those that are being drained."""
        return sum(not member.draining for member in self._members)

    @property
    def changing(self) -> bool:
        """Whether a replica joins or leaves at the next version boundary."""
        return bool(self._added) or self.staying < self.size

    @property
    def receivers(self) -> int:
        """How many receivers of weights all replicas have together."""
        return sum(member.engine.receivers for member in self._members)

    @property
    def versions(self) -> dict[int, int | None]:
        """Replica → version of the weights that it holds; None before its first update."""
        return {member.number: member.version for member in self._members}

    def join(self, engine: BaseRollout) -> None:
        """Take in a replica; one that is in already counts as mended.

        Once the pool has been sent weights, a new one gets requests only when an update has reached it.
        """
        known = next((m for m in self._members if m.engine is engine), None)
        self._members = [m for m in self._members if m is not known]
        member = Member(engine, self._numbers, behind=self._version is not None)
        if known is not None:
            member.version, member.asleep, member.behind = (
                known.version,
                known.asleep,
                known.behind or known.fault is not None,
            )
        self._members.append(member)
        self._numbers += 1

    def add(self, start: Callable[[int], BaseRollout], address: str) -> Member:
        """Start a replica that joins a server; it becomes a member in `settle`. May be called from any thread, by one at a time.

        Args:
            start: returns a started replica for a number.
            address: of the server.
        """
        number, self._numbers = self._numbers, self._numbers + 1
        member = Member(
            start(number),
            number,
            address=address,
            reopen=lambda: start(number),
            joined=Future(),
            behind=True,
        )
        self._added.append(member)
        return member

    def settle(self) -> None:
        """At a version boundary: take in those that were added, and let those go that are drained and have no request left."""
        leaving = [m for m in self._members if m.draining and not m.requests]
        self._members = [m for m in self._members if m not in leaving]
        while self._added:
            self._members.append(self._added.popleft())
        for member in leaving:
            _closed(member)

    def let_go(
        self, faults: Iterable[ReplicaFault], *, unreached: Collection[int] = ()
    ) -> tuple[tuple[ReplicaFault, ...], tuple[ReplicaFault, ...]]:
        """Remove those of these replicas that the run does without: they are drained, or were added and have not had weights yet.

        Args:
            faults: of the replicas.
            unreached: numbers of those whose server can't be joined again: they go, too, where another replica stays.

        Returns:
            The faults of those that are still members, and of those that went.
        """
        kept, gone = [], []
        for fault in faults:
            member = next(m for m in self._members if m.number == fault.number)
            lost = member.address is not None and fault.number in unreached and self.staying > 1
            if not (member.draining or member.joining or lost):
                kept.append(fault)
                continue
            gone.append(fault)
            self._members = [m for m in self._members if m is not member]
            if member.joined is not None and member.joining:
                member.joined.set_exception(fault.error)
            _closed(member)
        return tuple(kept), tuple(gone)

    def welcome(self, version: int) -> list[Member]:
        """Give requests to the replicas that were added and hold this version now, which is verified; return them."""
        new = [member for member in self._members if member.joining]
        for member in new:
            if member.joined is not None:
                member.joined.set_result(version)
        return new

    def lost(self) -> tuple[ReplicaFault, ...]:
        """Replicas that are of no use as they are, and why: died, failed too often, or left with weights in pieces.

        Asks every replica, so it blocks for a moment.
        """
        present = [member for member in self._members if not member.draining]
        answers = self._each(lambda engine: engine.alive(), present)
        faults = []
        for member, alive in answers:
            dead = alive is not True
            if isinstance(alive, Exception):
                faults.append(ReplicaFault(number=member.number, error=alive, dead=True))
            elif dead or member.fault is not None:
                error = member.fault or member.last_error or RolloutError("it has died")
                faults.append(ReplicaFault(number=member.number, error=error, dead=dead))
            elif member.failures >= self._max_failures:
                last = "" if member.last_error is None else f": {in_words(member.last_error)}"
                often = RolloutError(f"it failed {member.failures} times in a row{last}")
                faults.append(ReplicaFault(number=member.number, error=often))
        return tuple(faults)

    def state_of(self, member: Member) -> str:
        """Return `joining`, `draining`, `failed`, `behind` or `ready`."""
        if member.joining:
            return "joining"
        if member.draining:
            return "draining"
        if member.fault is not None or member.failures >= self._max_failures:
            return "failed"
        return "behind" if member.behind else "ready"

    def restart(self, numbers: Iterable[int]) -> tuple[ReplicaFault, ...]:
        """Start these replicas again, in the places of the old ones and with their numbers; all at the same time.

        They get requests once an update has reached them, where the pool has been sent weights at all.

        Returns:
            Those that could not be started.
        """
        wanted = set(numbers)
        chosen = [member for member in self._members if member.number in wanted]
        faults = []
        for member, started in self._each_member(self._started_again, chosen):
            if isinstance(started, Exception):
                member.fault = started
                faults.append(ReplicaFault(number=member.number, error=started, dead=True))
                continue
            place = self._members.index(member)
            self._members[place] = Member(
                started,
                member.number,
                address=member.address,
                reopen=member.reopen,
                behind=self._version is not None,
                draining=member.draining,
            )
        return tuple(faults)

    def close(self) -> None:
        """Close every replica; safe to call twice."""
        members, self._members = [*self._members, *self._added], []
        self._added.clear()
        for member in members:
            member.engine.close()

    def _started_again(self, member: Member) -> BaseRollout:
        if member.reopen is not None:
            _closed(member)
            return member.reopen()
        if self._restart is None:
            raise RolloutError(
                "nobody can start it again", hint="make the pool with a runtime's restart_replica"
            )
        return self._restart(member.engine)

    def _usable(self) -> list[Member]:
        return [member for member in self._members if self.state_of(member) == "ready"]

    def _each(
        self, call: Callable[[BaseRollout], T], members: Sequence[Member] | None = None
    ) -> list[tuple[Member, T | Exception]]:
        """Call every replica, or these, at the same time; one alone is called in this thread."""
        chosen = self._members if members is None else members
        return self._each_member(lambda member: call(member.engine), chosen)

    @staticmethod
    def _each_member(
        call: Callable[[Member], T], chosen: Sequence[Member]
    ) -> list[tuple[Member, T | Exception]]:
        def guarded(member: Member) -> tuple[Member, T | Exception]:
            try:
                return member, call(member)
            except Exception as error:  # noqa: BLE001 - the caller raises it, once all have answered
                return member, error

        if len(chosen) == 1:
            return [guarded(chosen[0])]
        with ThreadPoolExecutor(max_workers=max(len(chosen), 1)) as threads:
            return list(threads.map(guarded, list(chosen)))


def _closed(member: Member) -> None:
    """Close the replica of a member that leaves; its server may be gone already."""
    with suppress(Exception):
        member.engine.close()


def in_words(error: Exception) -> str:
    """An error's message; one that is not ours with its type."""
    message = getattr(error, "message", None)
    return str(message) if message is not None else f"{type(error).__name__}: {error}"
