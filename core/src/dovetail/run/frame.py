"""RunFrame: what surrounds the stages of a run: where it stands, its steps, signals, hooks and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from dovetail.errors import (
    CheckpointError,
    DovetailError,
    RolloutError,
    StopRequested,
    WeightSyncError,
    WorkerError,
)
from dovetail.run.interrupt import StopSwitch
from dovetail.run.parts import Parts
from dovetail.run.profile import StepProfile
from dovetail.run.state import RunState, save_checkpoint
from dovetail.telemetry.logging import set_step
from dovetail.weights.residency import GROUPS, Residency

if TYPE_CHECKING:
    from dovetail.experience.refill import Rollout


@attrs.define(kw_only=True, eq=False)
class StepRecord:
    """What is known of the step that is under way. It is forgotten with the step."""

    number: int
    """The first is 1."""
    metrics: dict[str, float] = attrs.field(factory=dict)
    tokens: int = 0
    """Tokens of prompts and responses."""
    rollout: Rollout | None = None
    updates: int = 0
    """Optimizer steps taken, of the actor and the critic."""
    kl_in_reward: float | None = None
    """Mean KL in nats a token, for the controller of the penalty in the reward, which learns it with the update."""
    counts: bool = False
    """Whether the update is through, so that the step counts whatever comes."""


class RunFrame:
    """Runs steps over the parts of a run, with timers, metrics, hooks and clean stops around them.

    Args:
        parts: what `dovetail.run.build.build` made.
        state: where the run stands: fresh, or read from a checkpoint.
        stop: what asks for a stop; one of its own where absent.
    """

    def __init__(self, parts: Parts, state: RunState, stop: StopSwitch | None = None) -> None:
        self._parts = parts
        self._state = state
        self._stop = stop or StopSwitch()
        groups = {role: getattr(parts, role) for role in GROUPS}
        self._residency = Residency(parts.config, groups, self._phase)
        self._profile = StepProfile(parts)
        self._now = StepRecord(number=state.step + 1)
        self._torn = False
        """Whether some weights are those of an update that broke off."""
        self._status = "running"
        self._began = time.monotonic()
        self._seconds_before = state.train_seconds
        self.loader = parts.loader

    # -- where the run stands ------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Finished steps."""
        return self._state.step

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        steps = self._parts.plan.counts.steps
        if steps is None:
            raise DovetailError(
                "a flow needs a plan made from the data, so that it knows its steps"
            )
        return steps

    @property
    def validated(self) -> bool:
        """Whether the first validation has been done, or its time is over."""
        return self.step > 0 or self._state.accuracy_before is not None

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds."""
        return {
            "status": self._status,
            "seed": self._parts.config.seed,
            "steps": self.step,
            "total_steps": self.total_steps,
            "accuracy_metric": self._state.accuracy_metric,
            "accuracy_before": self._state.accuracy_before,
            "accuracy_after": self._state.accuracy_after,
            "best": self._best_checkpoint(),
            "train_seconds": self._state.train_seconds,
            "directory": str(self._parts.run_directory.path),
        }

    # -- around the loop -----------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """The whole run: hooks, trackers, signals. However it ends, its finished steps are saved."""
        parts = self._parts
        self._began = time.monotonic()
        try:
            with self._stop:
                parts.trackers.begin(
                    {
                        "config": parts.config,
                        "plan": parts.plan,
                        "directory": parts.run_directory.path,
                        "start_step": self.step,
                        "total_steps": self.total_steps,
                    }
                )
                parts.logger.info("run started", total_steps=self.total_steps, done=self.step)
                parts.observers.emit("run_started", config=parts.config, plan=parts.plan)
                yield
                self._status = "completed"
        except StopRequested:
            self._status = "stopped"
            self.save()
            raise
        except BaseException as error:
            self._status = "failed"
            if isinstance(error, Exception):
                self._save_what_is_whole()
            # Whoever runs the command prints the error; the log keeps it with its traceback.
            parts.logger.info("run failed", error=repr(error), exc_info=error)
            parts.observers.emit("failure", step=self.step, error=error)
            raise
        finally:
            self._tick()
            parts.logger.info("run finished", status=self._status, steps=self.step)
            parts.observers.emit("run_finished", summary=self.summary())

    @contextmanager
    def begin_step(self) -> Iterator[None]:
        """One step. What ends it before the update leaves no trace of it; after the update it counts."""
        parts = self._parts
        before = parts.loader.state()
        self._now = StepRecord(number=self.step + 1)
        parts.timers.reset()
        set_step(self._now.number)
        parts.observers.emit("step_started", step=self._now.number)
        with self._profile.step(self._now.number):
            yield from self._stages(before)

    def _stages(self, before: Any) -> Iterator[None]:
        """What `begin_step` surrounds; `before` is where the loader stood."""
        parts, began = self._parts, time.monotonic()
        try:
            yield
        except Exception as error:
            if isinstance(error, WorkerError | RolloutError | WeightSyncError):
                error.during(f"step {self._now.number}")
            if self._now.counts:
                self._finish_step(began)
            else:
                parts.loader.load_state(before)
            raise
        self._finish_step(began)

    def save(self) -> None:
        """Write a checkpoint of the finished steps; nothing where one is there already."""
        parts = self._parts
        self._tick()
        if parts.store.has(self.step):
            return
        parts.trackers.phase(self.step, "checkpoint")
        path = save_checkpoint(parts, self._state)
        parts.logger.info("checkpoint saved", path=str(path))
        parts.observers.emit("checkpoint_saved", step=self.step, path=path)

    # -- for the stages ------------------------------------------------------------------------

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """A timed phase. After it, and after what it brought is kept, the stage asks for a stop."""
        self._parts.trackers.phase(self.step, name)
        with self._parts.timers(name):
            yield

    # -- helpers -------------------------------------------------------------------------------

    def _best_checkpoint(self) -> dict[str, Any] | None:
        """The marked one, for the summary; a mark that can't be read must not hide how the run ended."""
        try:
            best = self._parts.store.best()
        except CheckpointError:
            return None
        return None if best is None else best.to_summary()

    def _finish_step(self, began: float) -> None:
        parts, now = self._parts, self._now
        seconds = time.monotonic() - began
        self._state = attrs.evolve(self._state, step=now.number)
        self._tick()
        metrics = {
            **now.metrics,
            **parts.timers.metrics(),
            "time/step": seconds,
            "perf/tokens_per_second": now.tokens / seconds,
            "data/epoch": float(parts.loader.epoch),
        }
        parts.trackers.log(now.number, metrics)
        parts.observers.emit("step_finished", step=now.number, metrics=metrics)

    def _save_what_is_whole(self) -> None:
        """After a failure: the finished steps, unless the update itself broke off; a second fault is only reported."""
        if self._torn or not self.step:
            return
        try:
            self.save()
        except Exception as error:  # noqa: BLE001 - the run's own error must be the one that is seen
            self._parts.logger.warning("the failed run could not be saved", error=repr(error))

    def _tick(self) -> None:
        seconds = self._seconds_before + time.monotonic() - self._began
        self._state = attrs.evolve(self._state, train_seconds=seconds)
