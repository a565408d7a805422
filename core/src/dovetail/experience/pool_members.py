"""The members of a rollout pool: who takes requests, who has failed, who joins, leaves or starts again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    requests: int = 0
    """Requests in flight."""
    failures: int = 0
    """Incidents since the last success, however many requests each of them took down."""
    incidents: int = 0
    """Incidents ever."""
    draining: bool = False
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
    """

    def __init__(
        self,
        replicas: Iterable[BaseRollout],
        *,
        max_failures: int = 3,
        restart: Restart | None = None,
    ) -> None:
        self._members: list[Member] = []
        self._max_failures = max_failures
        self._restart = restart
        self._numbers = 0
        self._version: int | None = None
        for engine in replicas:
            self.join(engine)

    @property
    def replicas(self) -> tuple[BaseRollout, ...]:
        """The replicas that take requests."""
        return tuple(member.engine for member in self._usable())

    @property
    def size(self) -> int:
        """All replicas, those included that take no requests."""
        return len(self._members)

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

    async def drain(self, engine: BaseRollout) -> None:
        """Send a replica nothing more, wait until it has finished, and let it go.

        Raises:
            RolloutError: it is not in the pool.
        """
        member = next((m for m in self._members if m.engine is engine), None)
        if member is None:
            raise RolloutError("a replica that is not in the pool can't be drained")
        member.draining = True
        if member.requests:
            await member.idle.wait()
        self._members.remove(member)

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

    def restart(self, numbers: Iterable[int]) -> tuple[ReplicaFault, ...]:
        """Start these replicas again, in the places of the old ones and with their numbers; all at the same time.

        They get requests once an update has reached them, where the pool has been sent weights at all.

        Returns:
            Those that could not be started.
        """
        wanted = set(numbers)
        chosen = [member for member in self._members if member.number in wanted]
        faults = []
        for member, started in self._each(self._started_again, chosen):
            if isinstance(started, Exception):
                member.fault = started
                faults.append(ReplicaFault(number=member.number, error=started, dead=True))
                continue
            place = self._members.index(member)
            self._members[place] = Member(
                started, member.number, behind=self._version is not None, draining=member.draining
            )
        return tuple(faults)

    def close(self) -> None:
        """Close every replica; safe to call twice."""
        members, self._members = self._members, []
        for member in members:
            member.engine.close()

    def _started_again(self, engine: BaseRollout) -> BaseRollout:
        if self._restart is None:
            raise RolloutError(
                "nobody can start it again", hint="make the pool with a runtime's restart_replica"
            )
        return self._restart(engine)

    def _usable(self) -> list[Member]:
        return [
            member
            for member in self._members
            if member.failures < self._max_failures
            and member.fault is None
            and not (member.draining or member.behind)
        ]

    def _each(
        self, call: Callable[[BaseRollout], T], members: Sequence[Member] | None = None
    ) -> list[tuple[Member, T | Exception]]:
        """Call every replica, or these, at the same time; one alone is called in this thread."""
        chosen = self._members if members is None else members

        def guarded(member: Member) -> tuple[Member, T | Exception]:
            try:
                return member, call(member.engine)
            except Exception as error:  # noqa: BLE001 - the caller raises it, once all have answered
                return member, error

        if len(chosen) == 1:
            return [guarded(chosen[0])]
        with ThreadPoolExecutor(max_workers=max(len(chosen), 1)) as threads:
            return list(threads.map(guarded, list(chosen)))


def in_words(error: Exception) -> str:
    """An error's message; one that is not ours with its type."""
    message = getattr(error, "message", None)
    return str(message) if message is not None else f"{type(error).__name__}: {error}"
