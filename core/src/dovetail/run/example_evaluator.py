"""ExampleEvaluator: the objectives of a run on held-out examples."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from dovetail.batch.batch import Batch
from dovetail.checkpoint.best import Best
from dovetail.checkpoint.store import CheckpointStore
from dovetail.data.example_rows import Example
from dovetail.interfaces.objective import ObjectiveSpec
from dovetail.interfaces.plugin import LocalReduction
from dovetail.interfaces.stage import Stage, StepContext
from dovetail.metrics import values
from dovetail.planning.stage_list import PlannedStage
from dovetail.run.constant_columns import ConstantColumns
from dovetail.run.example_collector import Closing, StepExamples
from dovetail.run.learner import run_stage
from dovetail.run.record import RunRecord
from dovetail.stages.update_actor import actor_objective
from dovetail.stages.update_roles import role_objectives
from dovetail.weights.offload import OffloadManager

_MAKES_COLUMNS = ("score", "transform", "estimate")
"""Phases of stages without side effects: a check may stop the run, an update moves weights."""


class ExampleEvaluator:
    """Computes what each role minimises on held-out examples, without gradient.

    Args:
        record: of the run.
        groups: worker groups, by role.
        stages: of the plan, in its order; those before the updates make the columns that objectives read.
        plugins: on the controller, that stages use, by key path.
        offload_manager: brings a role's model onto the accelerator.
        constant: columns that are known of examples.
        examples: held out; none means that nothing is validated.
        closing: what follows each response.
        store: of checkpoints, which remembers the best one.
    """

    def __init__(
        self,
        record: RunRecord,
        *,
        groups: Mapping[str, Any],
        stages: Sequence[Stage],
        plugins: Mapping[str, Any],
        offload_manager: OffloadManager,
        constant: ConstantColumns,
        examples: Sequence[Example],
        closing: Closing | None,
        store: CheckpointStore,
    ) -> None:
        self._record, self._groups = record, groups
        self._offload_manager = offload_manager
        self._best = Best.of(record.config.trainer, store, record.logger)
        facts = record.plan.facts
        self._objectives = (
            {"actor": actor_objective(facts), **role_objectives(facts)} if examples else {}
        )
        self._batch = StepExamples(examples, closing).batch() if examples else None
        planned = zip(record.plan.stages, stages, strict=True)
        self._stages = [(plan, stage) for plan, stage in planned if plan.phase in _MAKES_COLUMNS]
        self._closing = closing
        self._plugins, self._constant, self._examples = plugins, constant, examples

    def validate(self) -> dict[str, float]:
        """Return the objectives' metrics: those of the actor as `val/…`, `val/loss` for `actor/loss`; those of another role as
        `val/<role>/…`. All held-out examples count as one mini-batch. Nothing where there are none.
        """
        record = self._record
        if self._batch is None:
            return {}
        began = time.monotonic()
        metrics: dict[str, float] = {}
        with record.phase("validation"):
            batch = self._batch
            for planned, stage in self._stages:
                batch = self._run(planned, stage, batch)
            for role, spec in self._objectives.items():
                prefix = "val" if role == "actor" else f"val/{role}"
                for name, value in self._measured(role, spec, batch).items():
                    metrics[f"{prefix}/{name.partition('/')[2]}"] = value
        metrics["time/validation"] = time.monotonic() - began
        record.hooks.metrics_logged(step=record.state.step, metrics=metrics)
        record.save_best(self._best, metrics)
        record.stop.check()
        return metrics

    def keep_constant(self, examples: Sequence[Example]) -> None:
        """Compute the constant columns of these examples and of the held-out ones, as far as the run directory has none, and close the models
        that nothing else needs.
        """
        if not self._constant.stages:
            return
        size = self._record.config.data.train_batch_size
        chunks = [
            StepExamples(part[start : start + size], self._closing).batch()
            for part in (examples, self._examples)
            for start in range(0, len(part), size)
        ]
        logger, constant = self._record.logger, self._constant
        for planned, stage in constant.stages:

            def compute(batch: Batch, stage: Any = stage) -> Batch:
                self._record.stop.check()
                return self._computed(stage, batch)

            columns = ", ".join(sorted(planned.provides))
            with self._offload_manager.present(*planned.roles), self._record.phase(planned.name):
                count = constant.fill(planned.name, chunks, compute)
            examples_said = f"{count} of {len(chunks)} batches computed, the others read"
            logger.info(f"{columns} of every example are known: {examples_said}")
        for role in sorted(constant.roles):
            self._groups[role].close()
            logger.info(f"the model of the role {role} is not needed any more: it is closed")

    def _run(self, planned: PlannedStage, stage: Stage, batch: Batch) -> Batch:
        """Return examples with the columns of a stage, as the next step would compute them."""
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
        """One objective's metrics: an engine's forward pass gives the outputs, and the objective is computed here."""
        import torch

        from dovetail.numerics import build_objective, prepare_mini_batch, resolve_metrics

        with self._offload_manager.present(role):
            scored: Batch = self._groups[role].forward(batch, frozenset(spec.outputs)).result()
        goal = build_objective(spec, seed=self._record.config.seed)
        prepared, denominators = prepare_mini_batch(goal, spec, batch, LocalReduction())
        outputs = {name: torch.from_numpy(scored[name].values) for name in spec.output_names}
        term = goal.term(outputs, prepared, denominators, spec.scalars)
        return values(resolve_metrics([term.metrics]))
