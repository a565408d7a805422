"""WeightPublisher: sends the actor's weights to the rollout, and to replicas that are started again."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces import Site, Tokenizer
from dovetail_rollouts.replica_states import ReplicaFault
from dovetail_rollouts.rollout_pool import RolloutPool
from dovetail_rollouts.rollout_service import RolloutService
from dovetail_rollouts.weight_check import WeightCheck
from dovetail_rollouts.weight_sync import WeightSync


class WeightPublisher:
    """Sends the rollout each version of the actor's weights.

    Args:
        site: of the run; the weight check scores the first of its training prompts.
        service: generates with the weights, and waits while they are sent.
        pool: the replicas that receive.
        tokenizer: of the run.
    """

    def __init__(
        self, site: Site, service: RolloutService, pool: RolloutPool, tokenizer: Tokenizer
    ) -> None:
        self._site, self._service, self._pool = site, service, pool
        self._weights, self._resting = site.weights, False
        self._offloads = site.config.rollout.offload
        check = WeightCheck.of(
            site.config, site.plan, site.data.train.prompts, tokenizer, site.logger
        )
        self._sync = WeightSync(
            site,
            pool=pool,
            weight_check=check,
            held=service.held,
            score=service.score,
        )
        service.bring_back_with(self._rescue)

    def publish(self) -> None:
        """Send the actor's weights to every replica, as a new version; nothing where neither they nor the replicas have changed.

        Raises:
            WeightSyncError: a replica did not take them, though it was started again; see `WeightSync.bring`.
        """
        if not (self._weights.stale or self._sync.discarded or self._pool.replicas.changing):
            return
        self._bring()
        self._service.settle()
        self._site.check_stop()

    def ready(self) -> None:
        """Bring the replicas onto the accelerator, with their weights, and let them generate."""
        if not self._sync.ready():
            self._bring()
            self._site.offloading.settle()
        self._resting = False
        self._service.resume()

    def rest(self) -> None:
        """Suspend generation and take the replicas off the accelerator, where `rollout.offload` says so, until they are `ready`."""
        if self._offloads and not self._resting:
            self._service.suspend(self._site.phase)
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
        self._site.offloading.settle()

    def _arrived(self, version: int) -> bool:
        return version in self._pool.replicas.versions.values()
