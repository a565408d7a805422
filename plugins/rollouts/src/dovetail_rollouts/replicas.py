"""ReplicaSet: the members of a rollout pool: joining, leaving, restarts, and operations on all members."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from dovetail.errors import RolloutError, WeightSyncError
from dovetail.interfaces import BaseRollout, WeightManifest
from dovetail.metrics import Metric, merge_metrics
from dovetail_rollouts.replica_states import Replica, ReplicaFault, ReplicaState, close

T = TypeVar("T")

EVERYTHING = frozenset({"weights", "kv_cache"})
"""Tags of all memory that a replica can free."""

Restart = Callable[[BaseRollout], BaseRollout]
"""A function that closes a replica and returns a new replica in its place, such as a runtime's `restart_replica`."""


class ReplicaSet:
    """The replicas of a rollout pool, by number. A restarted replica keeps its number; no number is used twice.

    Args:
        replicas: started replicas.
        restart: a function that closes a replica and starts a new one in its place; None if replicas can't be restarted.
        addresses: URLs of the servers that the first replicas joined, in the replicas' order.

    Only the thread that sends weights changes the members, in `settle`, `let_go` and `restart`, so that they are fixed during an update.
    An operation on all replicas returns the faults of the replicas that failed; all other replicas have completed the operation. A failed
    replica gets no requests until it is restarted or has received a complete update.
    """

    def __init__(
        self,
        replicas: Iterable[BaseRollout],
        *,
        restart: Restart | None = None,
        addresses: Sequence[str] = (),
    ) -> None:
        self._members: list[Replica] = []
        self._added: deque[Replica] = deque()
        self._restart = restart
        self._numbers = 0
        self._updated = False
        for engine in replicas:
            self.join(engine)
        for member, address in zip(self._members, addresses, strict=False):
            member.address = address

    @property
    def usable(self) -> tuple[BaseRollout, ...]:
        """The engines of the replicas that may get requests."""
        return tuple(member.engine for member in self._members if member.usable)

    @property
    def size(self) -> int:
        """The number of `members`, including those that get no requests."""
        return len(self._members)

    @property
    def members(self) -> tuple[Replica, ...]:
        """All replicas but those that join at the next weight update."""
        return tuple(self._members)

    @property
    def all(self) -> tuple[Replica, ...]:
        """All replicas, including those that join at the next weight update."""
        return (*self._members, *self._added)

    @property
    def staying(self) -> int:
        """The number of replicas that are not being drained."""
        return sum(not member.draining for member in self._members)

    @property
    def changing(self) -> bool:
        """Whether a replica joins or leaves at the next weight update."""
        return bool(self._added) or self.staying < self.size

    @property
    def receivers(self) -> int:
        """The number of weight receivers of all replicas together."""
        return sum(member.engine.receivers for member in self._members)

    @property
    def receivers_on(self) -> dict[str, int]:
        """The number of weight receivers on each machine; empty if the run is on one machine."""
        found: dict[str, int] = {}
        for member in self._members:
            if member.engine.machine is not None:
                found[member.engine.machine] = (
                    found.get(member.engine.machine, 0) + member.engine.receivers
                )
        return found

    @property
    def versions(self) -> dict[int, int | None]:
        """The version of the weights that each replica holds, by replica number; None before a replica's first update."""
        return {member.number: member.version for member in self._members}

    def join(self, engine: BaseRollout) -> None:
        """Add a started replica to the pool. If the pool has received weights already, the replica gets requests after the next update."""
        self._members.append(Replica(engine, self._numbers, self._started))
        self._numbers += 1

    def add(self, start: Callable[[int], BaseRollout], address: str) -> Replica:
        """Start a replica that joins a server, and return it; `settle` makes it a member. May be called from any thread, one call at a time.

        Args:
            start: a function that returns a started replica with the given number.
            address: the address of the server.
        """
        number, self._numbers = self._numbers, self._numbers + 1
        member = Replica(
            start(number),
            number,
            ReplicaState.STARTING,
            address=address,
            reopen=lambda: start(number),
            joined=Future(),
        )
        self._added.append(member)
        return member

    def settle(self) -> None:
        """Add new replicas to the pool, and remove drained replicas without requests. Called at a weight update."""
        leaving = [m for m in self._members if m.draining and not m.requests]
        self._members = [m for m in self._members if m not in leaving]
        while self._added:
            self._members.append(self._added.popleft())
        for member in leaving:
            member.leave()

    def let_go(
        self, faults: Iterable[ReplicaFault], *, unreached: Collection[int] = ()
    ) -> tuple[tuple[ReplicaFault, ...], tuple[ReplicaFault, ...]]:
        """Remove the faulty replicas that the run does not need: draining replicas, and added replicas without weights.

        Args:
            faults: the faults of the replicas.
            unreached: the numbers of replicas whose server can't be joined again; these are removed too, if another
                replica stays.

        Returns:
            The faults of the remaining replicas, and the faults of the removed ones.
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
            member.leave(fault.error)
        return tuple(kept), tuple(gone)

    def welcome(self, version: int) -> list[Replica]:
        """Start sending requests to the added replicas, which now hold this verified version, and return these replicas."""
        new = [member for member in self._members if member.joining]
        for member in new:
            member.welcome(version)
        return new

    def lost(self) -> tuple[ReplicaFault, ...]:
        """Return the faults of unusable replicas: dead, failed too often, or with a partial update. Draining replicas are left out.

        Every other replica is asked whether it is alive, so the call blocks for a moment.
        """
        present = [member for member in self._members if not member.draining]
        faults = []
        for member, alive in self.each(lambda member: member.engine.alive(), present):
            dead = alive is not True
            if isinstance(alive, Exception):
                faults.append(ReplicaFault(number=member.number, error=alive, dead=True))
            elif dead or member.fault is not None:
                error = member.fault or member.last_error or RolloutError("the replica has died")
                faults.append(ReplicaFault(number=member.number, error=error, dead=dead))
        return tuple(faults)

    def restart(self, numbers: Iterable[int]) -> tuple[ReplicaFault, ...]:
        """Restart the replicas with these numbers concurrently; they keep their numbers.

        If the pool has received weights already, restarted replicas get requests after the next update.

        Returns:
            The faults of the replicas that could not be started.
        """
        wanted = set(numbers)
        chosen = [member for member in self._members if member.number in wanted]
        faults = []
        for member, started in self.each(self._started_again, chosen):
            if isinstance(started, Exception):
                member.state, member.fault = ReplicaState.FAILED, started
                faults.append(ReplicaFault(number=member.number, error=started, dead=True))
                continue
            self._members[self._members.index(member)] = Replica(
                started,
                member.number,
                self._started,
                address=member.address,
                reopen=member.reopen,
                draining=member.draining,
            )
        return tuple(faults)

    def check_manifest(self, version: int, manifest: WeightManifest) -> tuple[ReplicaFault, ...]:
        """Ask every replica whether it supports the update that a manifest describes; replicas without an answer fail in the update itself.

        Returns:
            The faults of newly added replicas that do not support the update.

        Raises:
            WeightSyncError: a replica that is not newly added does not support the update; a retry would not help.
        """
        faults = []
        for member, answer in self.each(
            lambda member: member.engine.check_manifest(version, manifest)
        ):
            if isinstance(answer, WeightSyncError):
                if not member.joining:
                    raise answer
                faults.append(ReplicaFault(number=member.number, error=answer))
        return tuple(faults)

    def receive_weights(
        self,
        version: int,
        manifest: WeightManifest,
        failed: Callable[[Exception], None] | None = None,
    ) -> tuple[ReplicaFault, ...]:
        """Load new weights on all replicas concurrently.

        Args:
            version: the version of the weights.
            manifest: the description of the update.
            failed: a function that is called at each failure, while other replicas still wait; called from several threads.

        Returns:
            The faults of the replicas that did not receive the weights.
        """

        def take(engine: BaseRollout) -> None:
            try:
                engine.receive_weights(version, manifest)
            except Exception as error:
                if failed is not None:
                    failed(error)
                raise

        members = self.members
        for member in members:
            member.state = ReplicaState.RECEIVING
        faults = self._all(take, members)
        for member in members:
            if member.state is ReplicaState.RECEIVING:
                member.took(version)
                self._updated = True  # replicas that start from now on are behind
        return faults

    def metrics(self) -> dict[str, Metric]:
        """Return the replicas' metrics since the last call, merged by name; replicas that do not answer are left out."""
        answers = self.each(lambda member: member.engine.metrics())
        return merge_metrics(found for _, found in answers if not isinstance(found, Exception))

    def sleep(self, tags: frozenset[str] = EVERYTHING, *, keep_weights: bool = True) -> int:
        """Free the memory of these tags on every replica. See `BaseRollout.sleep` for `keep_weights`.

        Returns:
            The number of bytes freed. A replica that fails frees no memory, and is returned by `lost`.
        """
        freed: list[int] = []

        def let_go(engine: BaseRollout) -> None:
            # Engines of interface version 1.0 lack this argument.
            how: dict[str, Any] = {} if keep_weights else {"keep_weights": False}
            freed.append(engine.sleep(tags, **how))

        awake = [m for m in self._members if not tags <= m.asleep and m.fault is None]
        self._all(let_go, awake)
        for member in awake:
            member.asleep |= tags
        return sum(freed)

    def wake(self, tags: frozenset[str] = EVERYTHING) -> tuple[ReplicaFault, ...]:
        """Allocate the memory of these tags again on every replica that freed it and has not failed.

        Returns:
            The faults of the replicas that failed.
        """
        asleep = [m for m in self._members if m.asleep & tags and m.fault is None]
        faults = self._all(lambda engine: engine.wake(tags), asleep)
        for member in asleep:
            member.asleep -= tags
        return faults

    def close(self) -> None:
        """Close every replica; safe to call twice."""
        members, self._members = [*self._members, *self._added], []
        self._added.clear()
        for member in members:
            member.engine.close()

    def each(
        self, call: Callable[[Replica], T], members: Sequence[Replica] | None = None
    ) -> list[tuple[Replica, T | Exception]]:
        """Call a function with every replica, or with `members`, concurrently, and return each replica with its result or exception."""
        chosen = list(self._members if members is None else members)

        def guarded(member: Replica) -> tuple[Replica, T | Exception]:
            try:
                return member, call(member)
            except Exception as error:  # noqa: BLE001 - the caller raises it, once all have answered
                return member, error

        if len(chosen) == 1:
            return [guarded(chosen[0])]
        with ThreadPoolExecutor(max_workers=max(len(chosen), 1)) as threads:
            return list(threads.map(guarded, chosen))

    def _all(
        self, call: Callable[[BaseRollout], object], members: Sequence[Replica]
    ) -> tuple[ReplicaFault, ...]:
        """Call a function with the engines of these replicas concurrently; replicas whose call raises are marked as failed."""
        faults = []
        for member, result in self.each(lambda member: call(member.engine), members):
            if isinstance(result, Exception):
                member.fail(result)
                faults.append(
                    ReplicaFault(number=member.number, error=result, dead=not _alive(member.engine))
                )
        return tuple(faults)

    @property
    def _started(self) -> ReplicaState:
        """The state of a replica that has just started."""
        return ReplicaState.BEHIND if self._updated else ReplicaState.CURRENT

    def _started_again(self, member: Replica) -> BaseRollout:
        if member.reopen is not None:
            close(member.engine)
            return member.reopen()
        if self._restart is None:
            raise RolloutError(
                "the replica can't be restarted: its pool has no function that restarts replicas",
                hint="pass a runtime's `restart_replica` as `restart`",
            )
        return self._restart(member.engine)


def _alive(engine: BaseRollout) -> bool:
    try:
        return engine.alive()
    except Exception:  # noqa: BLE001 - who can't even say so is not
        return False
