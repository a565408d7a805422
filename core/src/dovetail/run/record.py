"""RunRecord: a run's position, and its reports to observers, run directory and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
from pluggy import HookRelay

from dovetail.checkpoint.best import Best
from dovetail.checkpoint.mark import Mark
from dovetail.data.loader import PromptLoader
from dovetail.dispatch.profiling import host_memory
from dovetail.errors import (
    CheckpointError,
    DiskFullError,
    DovetailError,
    NumericsError,
    RolloutError,
    StopRequested,
    WeightSyncError,
    WorkerError,
)
from dovetail.interfaces.plugin import Logger
from dovetail.interfaces.stage import StepContext
from dovetail.planning.plan import Plan
from dovetail.random_streams import seed_torch
from dovetail.run.checkpoints import CheckpointInProgress, RunCheckpoints, RunState
from dovetail.run.finite import name_bad_weight
from dovetail.run.interrupt import StopSwitch
from dovetail.run.profile import StepProfile
from dovetail.sections import RunConfig
from dovetail.telemetry.jsonl import read_rows
from dovetail.telemetry.logging import bind_process, bound_logs
from dovetail.telemetry.numbers import before_and_after
from dovetail.telemetry.run_directory import RunDirectory
from dovetail.telemetry.timers import Timers


@attrs.define(kw_only=True, eq=False)
class RunRecord:
    """Runs the parts around the steps of a run: timers, metrics, hooks, clean stops and checkpoints."""

    config: RunConfig
    plan: Plan
    state: RunState
    """Position of the run: new, or read from a checkpoint."""
    directory: RunDirectory
    checkpoints: RunCheckpoints
    loader: PromptLoader
    hooks: HookRelay
    """Caller of the observers' hooks: `hooks.step_started(step=1)`."""
    logger: Logger
    profile: StepProfile
    stop: StopSwitch
    accuracy: Callable[[], Mapping[str, Any]]
    """Function that returns `accuracy_metric`, `accuracy_before` and `accuracy_after` for the summary; see `ExperienceSource.summary`."""
    timers: Timers = attrs.field(factory=Timers)
    metrics: dict[str, float] = attrs.field(factory=dict)
    """Metrics of the current step, or of the time before the first step."""
    weights_dirty: bool = False
    """Whether an update has begun in a step whose prompts are not yet recorded as used or dropped; no checkpoint may keep such weights."""
    _best: Best | None = None
    _exported: bool = False
    _saving: CheckpointInProgress | None = None
    _failed_saves: int = 0
    _status: str = "running"
    _error: str | None = None
    _began: float = attrs.field(factory=time.monotonic)
    _seconds_before: float = 0.0

    def __attrs_post_init__(self) -> None:
        self._best = Best.of(self.config.trainer, self.checkpoints.store, self.logger)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        steps = self.plan.counts.steps
        if steps is None:
            raise DovetailError(
                "the run's number of steps is unknown: its plan was made without the data; pass a plan made from the data"
            )
        return steps

    def summary(self) -> dict[str, Any]:
        """Return the content of `summary.json`."""
        return {
            "status": self._status,
            **({"error": self._error} if self._error else {}),
            "seed": self.config.seed,
            "steps": self.state.step,
            "total_steps": self.total_steps,
            **self.accuracy(),
            "key_figures": before_and_after(
                read_rows(self.directory.metrics), self.plan.key_figures
            ),
            "best": self._best_checkpoint(),
            "model": str(self.directory.final) if self._exported else None,
            "train_seconds": self.state.train_seconds,
            **self._restarts(),
            "directory": str(self.directory.path),
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the block as the run; report its start, and an error that ends it, to observers.

        If a request to stop or an error ends the run, the finished steps are saved, unless the error interrupted an update. A second Ctrl-C
        saves nothing.
        """
        self._began = time.monotonic()
        self._seconds_before = self.state.train_seconds
        try:
            with self.stop:
                self.logger.info("run started", total_steps=self.total_steps, done=self.state.step)
                self.hooks.run_started(
                    config=self.config,
                    plan=self.plan,
                    directory=self.directory.path,
                    start_step=self.state.step,
                    total_steps=self.total_steps,
                )
                yield
                self.finish_save()
                self._status = "completed"
        except StopRequested:
            self._status = "stopped"
            with self._failure_reported():
                self.finish_save()
            self.save()
            self.finish_save()
            raise
        except BaseException as error:
            self._status = "failed"
            self._error = str(error).partition("\n")[0][:500] or type(error).__name__
            if isinstance(error, NumericsError | WeightSyncError) and not self.state.step:
                name_bad_weight(error, self.config, self.plan, self.logger)
            if isinstance(error, Exception):
                self._save_what_is_whole()
            # Level info, as the command prints the error itself; the log keeps the traceback.
            self.logger.info("run failed", error=repr(error), exc_info=error)
            self.hooks.failure(step=self.state.step, error=error)
            raise
        finally:
            self._update_seconds()
            self.logger.info("run finished", status=self._status, steps=self.state.step)

    @contextmanager
    def step(self, context: StepContext) -> Iterator[None]:
        """Prepare timers, metrics, observers and profiler for a step, run the block, and finish the step.

        Once the step's prompts are recorded as used or dropped, the step counts as finished and is logged, even if an error follows.
        """
        self.finish_save(wait=False)
        self.metrics = context.metrics
        self.timers.reset()
        bind_process(step=context.number)
        # The seed depends on the step, so that rewards and plugins of a resumed run draw the same numbers as in an uninterrupted
        # run. No model computes at this point, so that no engine's own random state is in use (`RandomState.in_force`).
        seed_torch(self.config.seed, "step", context.number)
        self.hooks.step_started(step=context.number)
        with self.profile.step(context.number):
            began = time.monotonic()
            try:
                yield
            except Exception as error:
                if isinstance(error, WorkerError | RolloutError | WeightSyncError):
                    error.during(f"step {context.number}")
                if context.counted:
                    self._finish(context, began)
                raise
            self._finish(context, began)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as a phase of the run, and name the phase to trackers that show progress."""
        self.hooks.phase_started(step=self.state.step, phase=name)
        with self.timers(name):
            yield

    def save(self, mark: Mark | None = None) -> None:
        """Start writing a checkpoint of the finished steps once the previous save is complete; an existing one is not rewritten.

        Before the last step, a full disk causes only a warning, at most `trainer.max_failed_saves` times in a row.

        Args:
            mark: metric and value if this is the best checkpoint so far.

        Raises:
            CheckpointError: this checkpoint or the previous one can't be written.
        """
        self._update_seconds()
        step = self.state.step
        if mark is None and self._saving is not None and self._saving.step == step:
            self.finish_save(wait=False)
            return
        self.finish_save()
        store = self.checkpoints.store
        if store.has(step):
            if mark is not None:
                store.mark_best(step, mark.value, mark.metric)
            if (keep := self.config.trainer.keep_checkpoints) is not None:
                store.retire(keep)  # a kill may have prevented it
            return
        self.hooks.phase_started(step=step, phase="checkpoint")
        with self._full_disk_reported(step):
            self._saving = self.checkpoints.save(self.state, mark)
        self.finish_save(wait=False)

    def validated(self, metrics: Mapping[str, float]) -> None:
        """Log a validation, and save this step's checkpoint if it is the best so far by `trainer.best_metric`."""
        self.state = attrs.evolve(self.state, validated=True)
        self.hooks.metrics_logged(step=self.state.step, metrics=metrics)
        if self._best is not None:
            self.finish_save()  # the save in progress may mark the best so far
            mark = self._best.improved(metrics)
            if mark is not None:
                self.save(mark)
        self.stop.check()

    def finish_save(self, *, wait: bool = True) -> None:
        """Wait until the running save is complete, and report it to the log, trackers and observers.

        Args:
            wait: whether to wait; if not, a save that is still running continues and is not reported.

        Raises:
            CheckpointError: the checkpoint can't be written; the error names the step.
        """
        saving = self._saving
        if saving is None or not (wait or saving.seconds.done()):
            return
        self._saving = None
        with self._full_disk_reported(saving.step):
            try:
                seconds = saving.seconds.result()
            except DovetailError as error:
                error.during(f"checkpoint of step {saving.step}")
                raise
            self._failed_saves = 0
            self.logger.info("checkpoint saved", path=str(saving.path))
            self.hooks.checkpoint_saved(step=saving.step, path=saving.path)
            metrics = {
                "time/checkpoint": seconds,
                "time/checkpoint_blocking": saving.blocking_seconds,
            }
            # Logged at the current step: trackers need steps in order, and later steps than the save's have been logged.
            self.hooks.metrics_logged(step=self.state.step, metrics=metrics)

    @contextmanager
    def _full_disk_reported(self, step: int) -> Iterator[None]:
        """Continue after a full disk, unless the checkpoint is the run's last or `trainer.max_failed_saves` failed in a row."""
        try:
            yield
        except DiskFullError as error:
            if self._status != "running" or step >= self.total_steps:
                raise
            self._failed_saves += 1
            most = self.config.trainer.max_failed_saves
            if self._failed_saves >= most:
                error.during(
                    f"{most} checkpoints in a row (trainer.max_failed_saves) were not saved"
                )
                raise
            self.logger.warning(
                f"training continues without this checkpoint (failed save {self._failed_saves} of at most {most}): {error}",
                step=step,
            )

    def export(self) -> None:
        """Write the trained model to `final/`, if the config asks for the export."""
        chosen = self.config.trainer.export
        if chosen == "none":
            return
        best = self.checkpoints.store.best() if chosen == "best" else None
        if chosen == "best" and best is None:
            self.logger.warning(
                "no checkpoint is marked as the best: the model after the last step is exported"
            )
        elif best is not None and not best.step:
            self.logger.warning(
                f"{best.metric} was best before the first step ({best.value:g}): final/ holds the model that the run began with"
            )
        self.hooks.phase_started(step=self.state.step, phase="export")
        self.checkpoints.export(self.directory.final, None if best is None else best.path)
        self._exported = True
        step = self.state.step if best is None else best.step
        self.hooks.model_exported(step=step, path=self.directory.final)
        self.logger.info("model exported", path=str(self.directory.final))

    def _restarts(self) -> dict[str, int]:
        """Return the number of restarts by a supervisor, and of steps repeated after them (`steps_repeated`); empty without restarts."""
        rows = read_rows(self.directory.restarts)
        repeated = sum(int(row.get("repeated", 0)) for row in rows)
        return {"restarts": len(rows), "steps_repeated": repeated} if rows else {}

    def _best_checkpoint(self) -> dict[str, Any] | None:
        """Return the best checkpoint for the summary; None if none is marked as the best, or if its mark can't be read."""
        try:
            best = self.checkpoints.store.best()
        except CheckpointError:
            return None
        return None if best is None else best.to_summary()

    def _finish(self, context: StepContext, began: float) -> None:
        seconds = time.monotonic() - began
        self.state = attrs.evolve(self.state, step=context.number)
        self._update_seconds()
        metrics = {
            **context.metrics,
            **self.timers.metrics(),
            "time/step": seconds,
            "perf/tokens_per_second": context.tokens / seconds,
            **{f"perf/{name}": value for name, value in host_memory().items()},
            "data/epoch": float(self.loader.epoch),
        }
        self.hooks.metrics_logged(step=context.number, metrics=metrics)
        self.hooks.step_finished(step=context.number, metrics=metrics)
        bound_logs(self.directory.path, self.config.trainer.max_log_bytes)

    def _save_what_is_whole(self) -> None:
        """Save the finished steps after a failure, unless the failure interrupted an update."""
        with self._failure_reported():
            self.finish_save()
        if self.state.step and not self.weights_dirty:
            with self._failure_reported():
                self.save()
                self.finish_save()

    @contextmanager
    def _failure_reported(self) -> Iterator[None]:
        """Log an error of the block, which saves a checkpoint, instead of raising it: the error that ends the run is the one to raise."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the run's own error must be the one that is seen
            self.logger.warning("the run could not be saved", error=repr(error))

    def _update_seconds(self) -> None:
        seconds = self._seconds_before + time.monotonic() - self._began
        self.state = attrs.evolve(self.state, train_seconds=seconds)
