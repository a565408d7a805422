"""Measuring: computes the loss of each role on held-out rows without an update, and the columns that training does not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import attrs

from dovetail.batch.batch import Batch
from dovetail.interfaces.objective import ObjectiveSpec
from dovetail.interfaces.stage import Stage, StepContext
from dovetail.planning.stage_list import PlannedStage
from dovetail.run.constant_columns import ConstantColumns
from dovetail.run.learner import run_stage
from dovetail.run.record import RunRecord
from dovetail.workers.offload import OffloadManager

_MAKES_COLUMNS = ("score", "transform", "estimate")
"""Phases whose stages only write columns. Left out are `check`, which may stop the run, and `update`, which changes weights."""


@attrs.define(kw_only=True, eq=False)
class Measuring:
    """Computes the loss of each role on a batch, without gradient; see `dovetail.interfaces.Measure`.

    Args:
        record: the state of the run, with its plan and logger.
        groups: worker groups, by role.
        stages: the stages of the plan, in the plan's order; stages before the updates compute the columns that objectives read.
        plugins: the controller's plugins that stages use, by key path.
        offload_manager: the manager that moves a role's model onto the accelerator.
        constant: the stored constant columns.
    """

    _record: RunRecord
    _groups: Mapping[str, Any]
    _stages: Sequence[Stage]
    _plugins: Mapping[str, Any]
    _offload_manager: OffloadManager
    _constant: ConstantColumns

    def __call__(self, batch: Batch) -> dict[str, float]:
        """Return the objectives' metrics; the batch counts as one mini-batch."""
        for planned, stage in zip(self._record.plan.stages, self._stages, strict=True):
            if planned.phase in _MAKES_COLUMNS:
                batch = self._run(planned, stage, batch)
        metrics: dict[str, float] = {}
        for model in self._record.plan.models:
            if model.objective is None:
                continue
            prefix = "val" if model.role == "actor" else f"val/{model.role}"
            for name, value in self._measured(model.role, model.objective, batch).items():
                metrics[f"{prefix}/{name.partition('/')[2]}"] = value
        return metrics

    def keep_constant(self, batches: Sequence[Batch]) -> None:
        """Compute constant columns that are not yet stored for these batches, and close models that nothing else needs."""
        constant, logger = self._constant, self._record.logger
        if not batches or not constant.stages:
            return
        for planned, stage in constant.stages:

            def compute(batch: Batch, stage: Any = stage) -> Batch:
                self._record.stop.check()
                return self._computed(stage, batch)

            columns = ", ".join(sorted(planned.provides))
            with self._offload_manager.present(*planned.roles), self._record.phase(planned.name):
                count = constant.fill(planned.name, batches, compute)
            counted = f"{count} of {len(batches)} batches were computed, the others read from disk"
            logger.info(f"{columns} are known for every example: {counted}")
        for role in sorted(constant.roles):
            self._groups[role].close()
            logger.info(f"the model of the role {role} is not needed any more: it is closed")

    def _run(self, planned: PlannedStage, stage: Stage, batch: Batch) -> Batch:
        """Return the batch with a stage's columns added: the stored ones if there are any, else computed as in the next step."""
        if (known := self._constant.complete(planned.name, batch)) is not None:
            return known
        with self._offload_manager.present(*planned.roles):
            done = self._computed(stage, batch)
        self._constant.remember(planned.name, done)
        return done

    def _computed(self, stage: Stage, batch: Batch) -> Batch:
        record = self._record
        step = StepContext(
            number=record.state.step + 1,
            facts=record.plan.facts,
            roles=self._groups,
            plugins=self._plugins,
            logger=record.logger,
            timer=lambda _: nullcontext(),
        )
        return run_stage(stage, batch, step)

    def _measured(self, role: str, spec: ObjectiveSpec, batch: Batch) -> dict[str, float]:
        """Return an objective's metrics, which the stage set computes from the outputs of the engine's forward pass."""
        with self._offload_manager.present(role):
            outputs: Batch = self._groups[role].forward(batch, frozenset(spec.outputs)).result()
        stage_set = self._record.plan.facts.plugins["algorithm.stage_set"].cls
        return stage_set.measure(spec, batch, outputs, self._record.config.seed)
