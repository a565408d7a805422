"""WeightPublisher: sends the actor's weights to the rollout, and to replicas that are started again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.experience.pool_members import ReplicaFault
from dovetail.experience.rollout_pool import RolloutPool
from dovetail.experience.rollout_service import RolloutService
from dovetail.interfaces.data import Prompt
from dovetail.interfaces.plugin import Tokenizer
from dovetail.run.actor_weights import ActorWeights
from dovetail.run.record import RunRecord
from dovetail.weights.offload import OffloadManager
from dovetail.weights.weight_check import WeightCheck
from dovetail.weights.weight_sync import WeightSync


class WeightPublisher:
    """Sends the rollout each version of the actor's weights.

    Args:
        record: of the run.
        weights: their versions.
        actor: the worker group that sends.
        service: generates with the weights, and waits while they are sent.
        pool: the replicas that receive.
        offload_manager: which training roles are on the accelerator.
        prompts: to train on; the weight check scores the first of them.
        tokenizer: of the run.
    """

    def __init__(
        self,
        record: RunRecord,
        weights: ActorWeights,
        *,
        actor: Any,
        service: RolloutService,
        pool: RolloutPool,
        offload_manager: OffloadManager,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
    ) -> None:
        self._record, self._offload_manager = record, offload_manager
        self._service, self._pool = service, pool
        self._weights, self._resting = weights, False
        self._offloads = record.config.rollout.offload
        self._sync = WeightSync(
            config=record.config,
            plan=record.plan,
            actor=actor,
            pool=pool,
            weight_check=WeightCheck.of(
                record.config, record.plan, prompts, tokenizer, record.logger
            ),
            offload_manager=offload_manager,
            run_directory=record.directory.path,
            logger=record.logger,
            phase=record.phase,
            metrics=lambda: record.metrics,
            held=service.held,
            score=service.score,
        )
        service.bring_back_with(self._rescue)

    def publish(self) -> None:
        """Send the actor's weights to every replica, as a new version; nothing where neither they nor the replicas have changed.

        Raises:
            WeightSyncError: a replica did not take them, though it was started again; see `WeightSync.bring`.
        """
        if not (self._weights.stale or self._sync.discarded or self._pool.changing):
            return
        self._bring()
        self._service.settle()
        self._record.stop.check()

    def ready(self) -> None:
        """Bring the replicas onto the accelerator, with their weights, and let them generate."""
        if not self._sync.ready():
            self._bring()
            self._offload_manager.settle()
        self._resting = False
        self._service.resume()

    def rest(self) -> None:
        """Suspend generation and take the replicas off the accelerator, where `rollout.offload` says so, until they are `ready`."""
        if self._offloads and not self._resting:
            self._service.suspend(self._record.phase)
            self._sync.rest()
            self._resting = True

    def generated(self) -> None:
        """Reset the count of restarts: generation succeeded."""
        self._sync.generated()

    def _bring(self) -> None:
        with self._weights.sending(self._arrived) as version:
            self._sync.bring(version)
        self._resting = False

    def _rescue(self, lost: Sequence[ReplicaFault]) -> None:
        """Restart the replicas and send them weights, after every one was lost while it generated."""
        with self._weights.sending(self._arrived) as version:
            self._sync.rescue(lost, version)
        self._resting = False
        self._offload_manager.settle()

    def _arrived(self, version: int) -> bool:
        return version in self._pool.versions.values()
