"""TrainingRun: implements the `Run` that a trainer drives, with the experience source, the learner and the workers of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

import attrs

from dovetail.checkpoint.manifest import MANIFEST
from dovetail.data.loader import PromptLoader
from dovetail.errors import PluginBrokenError, StopRequested
from dovetail.interfaces.plugin import Plugin
from dovetail.interfaces.run import Run, RunPosition
from dovetail.interfaces.runtime import Runtime, WorkerGroupHandle
from dovetail.interfaces.source import ExperienceSource, StepAsk
from dovetail.interfaces.stage import StepContext
from dovetail.interfaces.trainer import Trainer
from dovetail.plugins.titles import title_of
from dovetail.run.actor_weights import ActorWeights
from dovetail.run.checkpoints import RunCheckpoints
from dovetail.run.learner import Learner
from dovetail.run.measuring import Measuring
from dovetail.run.record import RunRecord
from dovetail.run.source_checks import collected, publishing


@attrs.define(kw_only=True, eq=False)
class TrainingRun(Run):
    """The run that a trainer drives; made by `dovetail.run.build.build`."""

    record: RunRecord
    source: ExperienceSource
    learner: Learner
    weights: ActorWeights
    measuring: Measuring
    checkpoints: RunCheckpoints
    loader: PromptLoader
    trainer: Trainer
    roles: Mapping[str, WorkerGroupHandle]
    """Worker groups by role."""
    plugins: Mapping[str, Plugin]
    """The controller's plugins that stages use, by key path."""
    runtime: Runtime
    started: ExitStack
    """Exit stack that closes the started parts of the run, the latest first."""
    _steps_begun: int = 0
    _published: bool = False
    """Whether this process has published weights."""
    _current: StepContext | None = None
    _calling: str | None = None

    @property
    def position(self) -> RunPosition:
        """The run's current position."""
        state = self.record.state
        return RunPosition(
            step=state.step,
            total_steps=self.record.total_steps,
            epoch=float(self.loader.epoch),
            weight_version=self.weights.version,
            validated=state.step > 0 or state.validated,
            admissible=self._admissible,
        )

    @property
    def _max_staleness(self) -> int:
        return self.trainer.max_staleness(self.trainer.config)

    @property
    def _collected(self) -> bool:
        """Whether the running step has its samples."""
        return self._current is not None and self._current.collected is not None

    @property
    def _admissible(self) -> int:
        if not (self.source.follows and self._published):
            return 0
        return max(0, min(self._left, self._limit - self._outstanding))

    @property
    def _over_sampling(self) -> float | None:
        return self.trainer.over_sampling(self.trainer.config)

    @property
    def _limit(self) -> int:
        """Maximum number of outstanding prompts (`_outstanding`), from the trainer's `over_sampling` or else its `max_staleness`."""
        steps = self._over_sampling or self._max_staleness + 1
        return round(steps * self.record.config.data.train_batch_size)

    @property
    def _due(self) -> int:
        """The last step that may train on samples from the rollout's current weights, at most the run's last step."""
        learned = self.record.state.step + bool(self._current and self._current.counted)
        last = learned - self.weights.steps + self._max_staleness + 1
        return min(last, self.record.total_steps)

    @property
    def _left(self) -> int:
        """Number of prompts that the remaining steps need beyond those already admitted (requested from the source)."""
        steps = self.record.total_steps - self.record.state.step - self._collected
        return steps * self.record.config.data.train_batch_size - self.source.outstanding

    @property
    def _outstanding(self) -> int:
        """Number of prompts that are admitted and not yet collected, or were collected since weights were last published."""
        learning = self._collected and not (self._current and self._current.counted)
        batch = self.record.config.data.train_batch_size
        return self.source.outstanding + (self.weights.steps + learning) * batch

    @contextmanager
    def step(self) -> Iterator[StepContext]:
        """Begin a step, yield its context, and finish the step after the block; see `Run.step`."""
        record, number = self.record, self.record.state.step + 1
        record.stop.check()
        if self._current is not None:
            raise self._broken(
                f"begins step {number} inside the block of a step",
                "end the block of that step first",
            )
        if number > record.total_steps:
            raise self._broken(
                f"begins step {number}, but the run has only {record.total_steps} steps",
                "take steps only while `not run.position.finished`",
            )
        self._steps_begun += 1
        trained = [model.role for model in record.plan.models if model.trained]
        step = StepContext(
            number=number,
            facts=record.plan.facts,
            roles=self.roles,
            plugins=self.plugins,
            logger=record.logger,
            timer=record.timers,
            weight_version=self.weights.version,
            first=self._steps_begun == 1,
            updates=dict.fromkeys(trained, 0),
        )
        self._current = step
        try:
            with record.step(step):
                yield step
                if not step.counted:
                    self._not_learned(number)
        except BaseException as error:
            if not step.counted:
                self.source.give_back(step.number, sound=isinstance(error, StopRequested))
            raise
        finally:
            self._current = None

    def admit(self, groups: int | None = None) -> None:
        """Begin to generate samples that later steps take; see `Run.admit`."""
        if not self.source.follows:
            return
        batch = self.record.config.data.train_batch_size
        left, outstanding = self._left, self._outstanding
        count = min(batch if groups is None else groups, left)
        if count <= 0:
            return
        if outstanding + count > self._limit:
            over = self._over_sampling
            setting = f"max_staleness = {self._max_staleness}"
            raise self._broken(
                f"admits {count} prompts while {outstanding} are outstanding; with "
                f"{setting if over is None else f'over_sampling = {over:g}'} at most {self._limit} may be outstanding",
                "publish weights after every step and admit as many prompts as a step takes, or raise the trainer's `max_staleness`",
            )
        self._check_published("admits prompts")
        with self._alone("admit"):
            following = self.record.state.step + self._collected + 1
            asked = self.learner.asks(following + self.source.outstanding // batch)
            self.source.admit(count, self._ask(following, asked))

    def collect(self, step: StepContext) -> None:
        """Generate and score the samples of a step; see `Run.collect`."""
        self._check_current("collect", step)
        if step.collected is not None:
            raise self._broken(
                f"collects twice in step {step.number}",
                "a step learns from one collection: take another step, or raise data.train_batch_size",
            )
        self._check_published(f"collects samples for step {step.number}")
        with self._alone("collect"):
            ask = self._ask(step.number, self.learner.asks(step.number))
            step.collected = collected(self.source, step, ask)
        step.weight_version = self.weights.version

    def learn(self, step: StepContext) -> None:
        """Run the stages of the plan; see `Run.learn`."""
        self._check_current("learn", step)
        if step.collected is None or step.counted:
            problem = "learns twice from" if step.counted else "learns before it collects in"
            raise self._broken(
                f"{problem} step {step.number}",
                "call `run.collect(step)` and then `run.learn(step)`, once each",
            )
        with self._alone("learn"):
            self.source.rest()
            try:
                self.learner.learn(step)
            finally:
                self.weights.steps += step.counted

    def publish_weights(self) -> None:
        """Send the actor's weights; see `Run.publish_weights`."""
        with (
            self._alone("publish_weights"),
            publishing(self.source, self.weights, self.record.logger),
        ):
            self.source.publish()
        self._published, self.weights.steps = True, 0

    def validate(self) -> Mapping[str, float]:
        """Score held-out prompts; see `Run.validate`."""
        self._check_between_steps("validate")
        self._check_published("validates")
        with self._alone("validate"):
            began = time.monotonic()
            metrics = self.source.validate(self.measuring)
            if metrics:
                metrics["time/validation"] = time.monotonic() - began
                self.record.validated(metrics)
            return metrics

    def save(self) -> None:
        """Write a checkpoint; see `Run.save`."""
        self._check_between_steps("save")
        with self._alone("save"):
            self.record.save()

    def train(self) -> None:
        """Let the trainer drive the run to its end.

        Raises:
            CheckpointError: a plugin's state holds a value that a checkpoint can't keep.
            PluginBrokenError: the trainer returned without a finished step, though there were steps to do.
            StopRequested: a stop was requested before the last step was done.
        """
        before = self.position
        with self.record.running():
            self.checkpoints.check_states()
            self.measuring.keep_constant(self.source.fixed())
            self.trainer.run(self)
            if not self.position.finished:
                self.record.stop.check()  # raises again if the trainer caught StopRequested
            if not before.finished and self.position.step == before.step:
                raise self._broken(
                    f"returned at step {before.step} of {before.total_steps} without finishing a step",
                    "run steps until `run.position.finished`",
                )
            if self.record.config.trainer.save_last:
                self.record.save()
            self.record.finish_save()
            self.record.export()

    def restore(self, checkpoint: Path) -> str:
        """Restore the state of every part from a checkpoint, and return a sentence that names the checkpoint."""
        for role in self.checkpoints.not_trained(checkpoint):
            self.record.logger.warning(
                "the run no longer trains a role: its weights are in this checkpoint, but in no later one",
                role=role,
                checkpoint=str(checkpoint),
            )
        self.record.state = self.checkpoints.restore(checkpoint)
        saved = datetime.fromtimestamp((checkpoint / MANIFEST).stat().st_mtime).astimezone()
        self.record.logger.info(
            "continues from a checkpoint",
            step=self.record.state.step,
            path=str(checkpoint),
            saved=saved.isoformat(timespec="seconds"),
        )
        return f"continues from {checkpoint.name}, saved {saved:%Y-%m-%d %H:%M:%S} ({checkpoint})"

    def close(self) -> None:
        """Close all started parts in reverse order, even if closing one fails."""
        self.started.close()

    def _ask(self, number: int, columns: frozenset[str]) -> StepAsk:
        groups = self.record.config.data.train_batch_size
        return StepAsk(step=number, due=self._due, groups=groups, columns=columns)

    def _not_learned(self, number: int) -> None:
        self.record.stop.check()  # raises again if the trainer caught StopRequested
        raise self._broken(
            f"ended step {number} without `run.learn(step)`",
            "call `run.learn(step)` in the step's block",
        )

    def _check_current(self, method: str, step: StepContext) -> None:
        if self._current is None or step is not self._current:
            raise self._broken(
                f"calls `run.{method}` with an object that is not the current step",
                f"write `with run.step() as step:`, and call `run.{method}(step)` in its block",
            )

    def _check_published(self, does: str) -> None:
        """Check that the rollout has the actor's weights, at most `max_staleness` steps old.

        Until this process has published weights, the rollout has those of `model.path`. `does` says in the error what the trainer did.
        """
        stale = self.weights.steps > self._max_staleness
        if not (self.source.follows and self.weights.stale) or (self._published and not stale):
            return
        what = "with weights that are not the actor's"
        if self._published:
            what += f" (steps since their publication: {self.weights.steps}; max_staleness: {self._max_staleness})"
        raise self._broken(
            f"{does} {what}",
            "call `run.publish_weights()` first, or raise the trainer's `max_staleness`",
        )

    def _check_between_steps(self, method: str) -> None:
        """Check that no step is running when the trainer calls `method`: within a step, the weights may be newer than `position` says."""
        if self._current is not None:
            raise self._broken(
                f"calls `run.{method}()` inside step {self._current.number}",
                "call it after the block `with run.step()`",
            )

    @contextmanager
    def _alone(self, method: str) -> Iterator[None]:
        if self._calling is not None:
            raise self._broken(
                f"calls `run.{method}` while `run.{self._calling}` is under way",
                "call the methods of the run one after another, from one thread",
            )
        self._calling = method
        try:
            yield
        finally:
            self._calling = None

    def _broken(self, problem: str, hint: str) -> PluginBrokenError:
        return PluginBrokenError(f"{title_of('trainer', self.trainer)} {problem}", hint=hint)
