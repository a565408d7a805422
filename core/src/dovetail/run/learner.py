"""Learner: executes the stages of the plan over the experience of a step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from dovetail.batch.batch import Batch
from dovetail.batch.columns import complaints_about, glossary
from dovetail.batch.ragged import Ragged
from dovetail.errors import ColumnError, NumericsError, PluginBrokenError, WorkerError
from dovetail.interfaces.source import ExperienceSource
from dovetail.interfaces.stage import Stage, StepContext
from dovetail.planning.stage_list import PlannedStage
from dovetail.plugins.titles import called, describe, title_of
from dovetail.run.actor_weights import ActorWeights
from dovetail.run.constant_columns import ConstantColumns
from dovetail.run.finite import check_finite, with_fault_file
from dovetail.run.record import RunRecord
from dovetail.run.source_checks import batch_of, keys_of
from dovetail.workers.offload import OffloadManager


class Learner:
    """Runs the planned stages of a step, each with timing, offloading, checks of its columns, and clean stops.

    Args:
        record: the state of the run, with its plan, metrics, hooks and timers.
        stages: the stages of the plan, in the plan's order.
        offload_manager: the manager that moves the models of a stage's roles onto the accelerator.
        weights: the counter of the actor's weight versions.
        source: the experience source, which provided the step's samples and records which prompts were used or dropped.
        constant: the stored constant columns.
    """

    def __init__(
        self,
        record: RunRecord,
        stages: Sequence[Stage],
        *,
        offload_manager: OffloadManager,
        weights: ActorWeights,
        source: ExperienceSource,
        constant: ConstantColumns,
    ) -> None:
        self._record, self._offload_manager = record, offload_manager
        self._constant = constant
        self._weights, self._source = weights, source
        self._left_out: dict[tuple[int, int, int], str] = {}
        """Prompt of the current step → the stage that left out all of the prompt's samples."""
        self._stages = list(zip(record.plan.stages, stages, strict=True))
        plugins = [plugin.cls for plugin in record.plan.facts.plugins.values()]
        self._columns = glossary(c for cls in (*plugins, *map(type, stages)) for c in cls.columns)

    def asks(self, number: int) -> frozenset[str]:
        """Return the optional columns that the experience source must provide for step `number`."""
        facts = self._record.plan.facts
        asked = (stage.asks(number, facts) for _, stage in self._stages)
        return self._record.plan.on_request.union(*asked)

    def learn(self, step: StepContext) -> None:
        """Run every stage, record which prompts were used or dropped, and call `step_counted` of every stage.

        Raises:
            NumericsError: a column, loss or gradient is not finite, or rollout and trainer differ too much.
            PluginBrokenError: a stage does not return what it declares.
        """
        record = self._record
        batch = batch_of(self._source, step, self._columns)
        columns: Collection[str] = batch.names
        if len(batch):
            check_finite(batch, columns, step=step, directory=record.directory)
            batch, before_updates = self._run_stages(batch, step)
        else:
            before_updates = set(step.metrics)
            self._nothing_left(step, len(step.experience.reasons))
        trained = keys_of(batch)
        reasons = {**step.experience.reasons, **self._left_out}
        self._source.settle(step.number, trained, reasons)
        record.weights_dirty, step.counted = False, True
        step.metrics |= {f"{role}/updates": float(count) for role, count in step.updates.items()}
        for _, stage in self._stages:
            called(partial(title_of, "stage", stage), stage.step_counted, batch, step)
        metrics = {n: value for n, value in step.metrics.items() if n not in before_updates}
        record.hooks.update_finished(step=step.number, metrics=metrics)
        record.stop.check()

    def _run_stages(self, batch: Batch, step: StepContext) -> tuple[Batch, set[str]]:
        """Run the stages; return the batch after the last one, and the names of the metrics that were logged before the first update."""
        plan = self._record.plan
        unread = plan.facts.plugins["source"].cls.on_request - plan.on_request
        before_updates: set[str] = set()
        self._left_out = {}
        for planned, stage in self._stages:
            if planned.phase not in ("score", "check"):
                batch = batch.drop(unread)  # columns collected for checks only
            title = partial(title_of, "stage", stage)
            own = not planned.of_set
            if called(title, stage.skips, batch, step):
                self._check_skipped(planned, stage)
                continue
            lock = own and not planned.roles  # torch warns of tensors from read-only arrays
            result: Any = self._constant.complete(planned.name, batch)
            if result is None:
                with self._around(planned, step), _locked(batch) if lock else nullcontext():
                    result = run_stage(stage, batch, step)
            self._check_columns(planned, stage, batch, result, step)
            written = planned.provides | planned.rewrites
            check_finite(
                result,
                written,
                step=step,
                directory=self._record.directory,
                writer=title if own else None,
            )
            self._record.hooks.stage_finished(
                step=step.number, stage=planned.name, before=batch, after=result
            )
            if stage.changes_samples:
                gone = keys_of(batch) - keys_of(result)
                self._left_out |= dict.fromkeys(gone, planned.name)
            batch = result
            if not len(batch):
                self._nothing_left(step, len(self._left_out))
                return batch, before_updates | set(step.metrics)
            if planned.phase != "update":
                before_updates = set(step.metrics)
                self._record.stop.check()
        return batch, before_updates

    @contextmanager
    def _around(self, planned: PlannedStage, step: StepContext) -> Iterator[None]:
        """Run the block as a stage: with its models on the accelerator, timed, and with its errors completed.

        The samples that a NumericsError names are written to a file, and an out-of-memory error gets a hint.
        """
        record = self._record
        updates = planned.roles if planned.phase == "update" else ()
        try:
            with self._offload_manager.present(*planned.roles), record.phase(planned.name):
                if updates:
                    _memory(planned, step)  # resets the peaks
                    record.weights_dirty = True
                yield
                if updates:
                    step.metrics |= _memory(planned, step)
        except NumericsError as error:
            # An engine takes no optimizer step with non-finite numbers: weights have changed only if an earlier update succeeded.
            record.weights_dirty = any(step.updates.values())
            updates = tuple(role for role in updates if step.updates.get(role))
            if not error.sample_ids:
                raise
            raise with_fault_file(error, step=step, directory=record.directory) from error
        except WorkerError as error:
            if "OutOfMemoryError" in error.message and error.hint is None:
                config = record.plan.facts.config
                keys = [
                    f"{config.role_key(role)}.max_tokens_per_micro_batch" for role in planned.roles
                ]
                error.hint = (
                    f"lower {' and '.join(keys)} (activations grow with it), or divide the model over more accelerators; "
                    "`dovetail plan` prints what weights, gradients and optimizer states take"
                )
            raise
        finally:
            for role in updates:
                self._weights.updated(role)

    def _check_skipped(self, planned: PlannedStage, stage: Stage) -> None:
        for other, column in self._readers(planned):
            raise PluginBrokenError(
                f"{title_of('stage', stage)} skips a step, but {other} requires its column {column!r}",
                hint="the stage may skip a step only if no later stage requires its columns; correct `skips`",
            )

    def _readers(self, planned: PlannedStage) -> Iterator[tuple[str, str]]:
        """Yield the later stages that require a column of this stage, each with the column."""
        after = False
        for other, _ in self._stages:
            if after:
                written = planned.provides | planned.rewrites
                yield from ((other.name, column) for column in sorted(written & other.reads.keys()))
            after |= other is planned

    def _check_columns(
        self, planned: PlannedStage, stage: Stage, before: Batch, after: object, step: StepContext
    ) -> None:
        """Check that a stage changed only the columns that it declares; in the first step, check also dtypes and shapes.

        Raises:
            PluginBrokenError: a check failed; the error names the stage.
        """
        if not isinstance(after, Batch):
            raise _broken(
                stage,
                f"returned {describe(after)}, not a Batch",
                "end `run` with `return batch.with_columns({…})`, or with `return batch`",
            )
        if len(after) != len(before) and not stage.changes_samples:
            raise _broken(
                stage,
                f"returned {len(after)} samples for {len(before)}",
                "return the same samples in the same order; only a sample filter, or a stage with `changes_samples = True`, may "
                "leave samples out",
            )
        old: Mapping[str, Any] = before.columns
        new: Mapping[str, Any] = after.columns
        declared = planned.provides | planned.rewrites
        changed = {name for name in new if name not in old or new[name] is not old[name]}
        if extra := sorted(changed - declared - (old.keys() if stage.changes_samples else set())):
            verb = "wrote" if extra[0] not in old else "changed"
            raise _broken(stage, f"{verb} the column {extra[0]!r}, which it does not declare")
        if gone := sorted(old.keys() - new.keys()):
            raise _broken(stage, f"removed the column {gone[0]!r}", "keep all columns of the batch")
        for other, column in self._readers(planned):
            if column not in new:
                raise _broken(
                    stage, f"returned no column {column!r}, which {other} requires from it"
                )
        if step.first:
            along = {self._columns[name].along for name in changed} & new.keys()
            chosen = after.select({*changed, *filter(None, along)})
            if complaints := complaints_about(chosen, self._columns):
                raise _broken(
                    stage,
                    f"wrote columns that differ from their declaration: {'; '.join(complaints)}",
                    "keep the dtype and shape of the column, as by `values.astype(np.float32)`",
                )

    def _nothing_left(self, step: StepContext, prompts: int) -> None:
        self._record.logger.warning(
            "no group is left to train on: the step changes no weight",
            step=step.number,
            prompts=prompts,
        )


def run_stage(stage: Stage, batch: Batch, step: StepContext) -> Any:
    """Run a stage and return its result; errors name the stage."""
    title = partial(title_of, "stage", stage)
    try:
        return called(title, stage.run, batch, step)
    except ColumnError as error:
        error.during(title())
        error.hint = error.hint or "name every column that the stage reads in `requires`"
        raise


def _memory(planned: PlannedStage, step: StepContext) -> dict[str, float]:
    """Return the memory figures of a stage's roles, each the largest over the ranks, and reset the peaks."""
    found: dict[str, float] = {}
    for role in planned.roles:
        for rank in step.roles[role].memory().result():
            for name, value in rank.items():
                found[f"{role}/{name}"] = max(value, found.get(f"{role}/{name}", 0.0))
    return found


@contextmanager
def _locked(batch: Batch) -> Iterator[None]:
    """Make a batch's arrays read-only within the block, as far as they are in this process, because other batches share them."""
    arrays = [
        array
        for column in batch.columns.values()
        if isinstance(array := column.values if type(column) is Ragged else column, np.ndarray)
        and array.flags.writeable
    ]
    for array in arrays:
        array.flags.writeable = False
    try:
        yield
    finally:
        for array in arrays:
            array.flags.writeable = True


_DECLARED = "name every column that `run` writes in the class methods `provides` and `rewrites`"


def _broken(stage: Stage, problem: str, hint: str = _DECLARED) -> PluginBrokenError:
    return PluginBrokenError(f"{title_of('stage', stage)} {problem}", hint=hint)
