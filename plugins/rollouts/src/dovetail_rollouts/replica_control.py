"""ReplicaControl: what every replica of a pool does alike: take weights, score, sleep and wake, and say its figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dovetail.errors import WeightSyncError
from dovetail.interfaces import BaseRollout, PauseMode, WeightManifest
from dovetail.metrics import Metric, merge_metrics
from dovetail_rollouts.replica_states import Replica, ReplicaFault, ReplicaState
from dovetail_rollouts.replicas import ReplicaSet

EVERYTHING = frozenset({"weights", "kv_cache"})
"""All memory that a replica can let go."""


class ReplicaControl:
    """Calls all replicas as one. Where a replica fails, the others have done their part all the same: faults are returned, and
    the one at fault gets no requests until it has been started again or taken a whole update.
    """

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas

    async def score(
        self, sequences: Sequence[np.ndarray]
    ) -> dict[int, list[np.ndarray] | Exception]:
        """Return how likely every replica finds given tokens; see `BaseRollout.score`.

        Returns:
            Replica → float32 [L_i − 1] for each sequence, or what it raised.
        """
        members = self._replicas.members
        answers = await asyncio.gather(
            *(member.engine.score(sequences) for member in members), return_exceptions=True
        )
        found: dict[int, list[np.ndarray] | Exception] = {}
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, Exception):
                raise answer
            found[member.number] = answer
        return found

    async def freeze(self) -> list[Replica]:
        """Stop requests where they are on every replica, with their keys and values, until `thaw`; return those that were asked to.

        A replica that can't stop them answers for them itself: it loses them, or interrupts them when the weights come.
        """
        members = [m for m in self._replicas.members if m.fault is None]
        await asyncio.gather(
            *(member.engine.pause(PauseMode.KEEP_CACHE) for member in members),
            return_exceptions=True,
        )
        return members

    async def thaw(self, members: Sequence[Replica]) -> list[Replica]:
        """Let requests go on; return the replicas whose requests should not: they have failed since they stopped."""
        answers = await asyncio.gather(
            *(member.engine.resume() for member in members), return_exceptions=True
        )
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, Exception):
                member.fail(answer)
        return [m for m in members if m.state in (ReplicaState.FAILED, ReplicaState.GONE)]

    def check_manifest(self, version: int, manifest: WeightManifest) -> tuple[ReplicaFault, ...]:
        """Ask every replica whether it takes such an update; who can't answer is found out by the update itself.

        Returns:
            Those that were just added, and do not.

        Raises:
            WeightSyncError: another does not, however often it comes.
        """
        faults = []
        for member, answer in self._replicas.each(
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
        """Load new weights on every replica, all at the same time.

        Args:
            version: of the weights.
            manifest: what comes.
            failed: told of each failure at once, while others still wait; called from several threads.

        Returns:
            Those that did not take them.
        """

        def take(engine: BaseRollout) -> None:
            try:
                engine.receive_weights(version, manifest)
            except Exception as error:
                if failed is not None:
                    failed(error)
                raise

        members = self._replicas.members
        for member in members:
            member.state = ReplicaState.RECEIVING
        faults = self._all(take, members)
        for member in members:
            if member.state is ReplicaState.RECEIVING:
                self._replicas.took(member, version)
        return faults

    def metrics(self) -> dict[str, Metric]:
        """Return what the replicas did since they were last asked, merged by name; who does not answer is left out."""
        answers = self._replicas.each(lambda member: member.engine.metrics())
        return merge_metrics(found for _, found in answers if not isinstance(found, Exception))

    def sleep(self, tags: frozenset[str] = EVERYTHING, *, keep_weights: bool = True) -> int:
        """Free the memory of these tags on every replica that has it; for `keep_weights` see `BaseRollout.sleep`.

        Returns:
            The bytes freed. A replica that fails frees none, and is among the `lost`.
        """
        freed: list[int] = []

        def let_go(engine: BaseRollout) -> None:
            # Engines of interface 1.0 do not know the argument.
            how: dict[str, Any] = {} if keep_weights else {"keep_weights": False}
            freed.append(engine.sleep(tags, **how))

        awake = [m for m in self._replicas.members if not tags <= m.asleep and m.fault is None]
        self._all(let_go, awake)
        for member in awake:
            member.asleep |= tags
        return sum(freed)

    def wake(self, tags: frozenset[str] = EVERYTHING) -> tuple[ReplicaFault, ...]:
        """Take the memory of these tags again on every replica that has let it go.

        Returns:
            Those that could not.
        """
        asleep = [m for m in self._replicas.members if m.asleep & tags and m.fault is None]
        faults = self._all(lambda engine: engine.wake(tags), asleep)
        for member in asleep:
            member.asleep -= tags
        return faults

    def _all(
        self, call: Callable[[BaseRollout], object], members: Sequence[Replica]
    ) -> tuple[ReplicaFault, ...]:
        """Call these replicas at the same time; who fails is at fault from then on."""
        faults = []
        for member, result in self._replicas.each(lambda member: call(member.engine), members):
            if isinstance(result, Exception):
                member.fail(result)
                faults.append(
                    ReplicaFault(number=member.number, error=result, dead=not _alive(member.engine))
                )
        return tuple(faults)


def _alive(engine: BaseRollout) -> bool:
    try:
        return engine.alive()
    except Exception:  # noqa: BLE001 - who can't even say so is not
        return False
