"""ExampleEvaluator: the objectives of a run on held-out examples."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from dovetail.checkpoint.best import Best
from dovetail.checkpoint.store import CheckpointStore
from dovetail.interfaces.stage import Stage, StepContext
from dovetail.run.example_collector import StepExamples
from dovetail.run.learner import run_stage
from dovetail.run.record import RunRecord
from dovetail.stages.update_actor import actor_objective
from dovetail.stages.update_roles import role_objectives
from dovetail.weights.offload import OffloadManager

if TYPE_CHECKING:
    from dovetail.batch.batch import Batch
    from dovetail.data.example_rows import Example
    from dovetail.interfaces.objective import ObjectiveSpec

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
        examples: held out; none means that nothing is validated.
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
        examples: Sequence[Example],
        store: CheckpointStore,
    ) -> None:
        self._record, self._groups = record, groups
        self._offload_manager = offload_manager
        self._best = Best.of(record.config.trainer, store, record.logger)
        facts = record.plan.facts
        self._objectives = (
            {"actor": actor_objective(facts), **role_objectives(facts)} if examples else {}
        )
        self._batch = StepExamples(examples).batch() if examples else None
        planned = zip(record.plan.stages, stages, strict=True)
        self._stages = [(plan, stage) for plan, stage in planned if plan.phase in _MAKES_COLUMNS]
        self._plugins = plugins

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
            batch = self._with_columns(self._batch)
            for role, spec in self._objectives.items():
                prefix = "val" if role == "actor" else f"val/{role}"
                for name, value in self._measured(role, spec, batch).items():
                    metrics[f"{prefix}/{name.partition('/')[2]}"] = value
        metrics["time/validation"] = time.monotonic() - began
        record.hooks.metrics_logged(step=record.state.step, metrics=metrics)
        record.save_best(self._best, metrics)
        record.stop.check()
        return metrics

    def _with_columns(self, batch: Batch) -> Batch:
        """The held-out examples with the columns of the stages before the updates, as the next step would compute them."""
        record = self._record
        step = StepContext(
            number=record.state.step + 1,
            facts=record.plan.facts,
            roles=self._groups,
            plugins=self._plugins,
            logger=record.logger,
            timer=lambda _: nullcontext(),
        )
        for planned, stage in self._stages:
            with ExitStack() as present:
                for role in planned.roles:
                    present.enter_context(self._offload_manager.present(role))
                batch = run_stage(stage, batch, step)
        return batch

    def _measured(self, role: str, spec: ObjectiveSpec, batch: Batch) -> dict[str, float]:
        """One objective's metrics: an engine's forward pass gives the outputs, and the objective is computed here."""
        import torch

        from dovetail.interfaces.plugin import LocalReduction
        from dovetail.metrics import values
        from dovetail.numerics import resolve_metrics
        from dovetail.training import build_objective, prepare_mini_batch

        with self._offload_manager.present(role):
            scored: Batch = self._groups[role].forward(batch, frozenset(spec.outputs)).result()
        goal = build_objective(spec, seed=self._record.config.seed)
        prepared, denominators = prepare_mini_batch(goal, spec, batch, LocalReduction())
        outputs = {name: torch.from_numpy(scored[name].values) for name in spec.output_names}
        term = goal.term(outputs, prepared, denominators, spec.scalars)
        return values(resolve_metrics([term.metrics]))
