"""WeightStages: when the rollout gets the actor's weights, and what brings replicas back that were lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from dovetail.run.frame import RunFrame
from dovetail.weights.probe import Probe
from dovetail.weights.weight_sync import WeightSync

if TYPE_CHECKING:
    from dovetail.experience.pool_members import Fault
    from dovetail.run.interrupt import StopSwitch
    from dovetail.run.parts import Parts
    from dovetail.run.state import RunState


class WeightStages(RunFrame):
    """Weight updates over the parts of a run. Arguments as in `RunFrame`."""

    def __init__(self, parts: Parts, state: RunState, stop: StopSwitch | None = None) -> None:
        super().__init__(parts, state, stop)
        self._moved = True
        """Whether the actor's weights are not the rollout's, as before any were sent."""
        self._sync = WeightSync(
            config=parts.config,
            plan=parts.plan,
            actor=parts.actor,
            pool=parts.pool,
            probe=Probe.of(parts.config, parts.plan, parts.tokenizer),
            residency=self._residency,
            run_directory=parts.run_directory.path,
            logger=parts.logger,
            phase=self._phase,
            metrics=lambda: self._now.metrics,
        )
        parts.pool.rescue = self._rescue

    def sync_weights(self) -> None:
        """Send the actor's weights to every rollout replica, as a new version; nothing where they have not moved.

        Raises:
            WeightSyncError: a replica did not take them, though it was started again; see `WeightSync.bring`.
        """
        if not self._moved and not self._sync.discarded:
            return
        self._bring()
        self._stop.check()

    def _ready_to_generate(self) -> None:
        """The replicas have the accelerator, and their weights."""
        if not self._sync.ready():
            self._bring()
            self._residency.settle()

    def _bring(self) -> None:
        version = self._wanted_version()
        self._sync.bring(version)
        self._sent(version)

    def _rescue(self, lost: Sequence[Fault]) -> None:
        """Every replica was lost while it generated."""
        version = self._wanted_version()
        self._sync.rescue(lost, version)
        self._sent(version)
        self._residency.settle()

    def _wanted_version(self) -> int:
        """The version of the actor's weights: the one in force while they have not moved."""
        return self._state.weight_version + (1 if self._moved else 0)

    def _sent(self, version: int) -> None:
        self._state = attrs.evolve(self._state, weight_version=version)
        self._moved = False
