"""Run: the interface through which a trainer drives a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from dovetail.interfaces.stage import StepContext


@attrs.frozen(kw_only=True)
class RunPosition:
    """The progress of a run."""

    step: int
    """Number of finished steps."""
    total_steps: int
    """Number of steps of the whole run."""
    epoch: float
    """Passes over the training prompts so far."""
    weight_version: int
    """Version of the weights that the rollout holds; 0 in a fresh run, before the first publication."""
    validated: bool
    """Whether the validation before the first step is done, or the first step is finished."""
    admissible: int = 0
    """Number of prompts that `Run.admit` accepts now. It is limited by the trainer's `max_staleness` or `over_sampling`, and by the
    number of prompts that the remaining steps need."""

    @property
    def finished(self) -> bool:
        """Whether every step is done."""
        return self.step >= self.total_steps


class Run(ABC):
    """A run as its trainer drives it: the current position, and methods that continue the run.

    A trainer chooses the order in which it calls these methods, one after another, from one thread:

        run.publish_weights()
        while not run.position.finished:
            with run.step() as step:
                run.collect(step)
                run.learn(step)
                run.publish_weights()
            if run.position.step % 10 == 0:
                run.validate()
                run.save()

    Hooks, trackers, signals and the checkpoint of a run that fails or is stopped are handled outside of `Trainer.run`. Every method may
    raise StopRequested after the user has asked for a stop; a trainer must not catch it. The trainer itself must implement the keys
    `validate_every`, `save_every`, `validate_before` and `validate_after` of its section (`self.config.validate_every`).
    """

    @property
    @abstractmethod
    def position(self) -> RunPosition:
        """The progress of the run so far."""

    @abstractmethod
    def step(self) -> AbstractContextManager[StepContext]:
        """Return the context of one step. The step counts as finished once `learn` is complete.

        An error before the end of `learn` undoes the step: the next step gets the samples. If the error ends the run, the resumed run
        issues the prompts of these samples again.

        `position` advances when the block ends.

        Raises:
            PluginBrokenError: the block ended without an error and without `learn`, another step is running, or the run is
                finished.
        """

    @abstractmethod
    def admit(self, groups: int | None = None) -> None:
        """Start generating and scoring samples for the next prompts, with the rollout's current weights, and return at once.

        Later calls of `collect` take the samples in the order of the prompts. No effect if the remaining steps have all their prompts,
        or in a run on a dataset's examples.

        Args:
            groups: the number of prompts; by default that of a step (`data.train_batch_size`).

        Raises:
            PluginBrokenError: more prompts would be outstanding than (`Trainer.max_staleness` + 1) · `data.train_batch_size`, or than
                the limit that `Trainer.over_sampling` sets instead. A prompt is outstanding from `admit` until weights are published
                after the step that trained on its samples.
            PluginBrokenError: the rollout's weights are too old, see `collect`.
        """

    @abstractmethod
    def collect(self, step: StepContext) -> None:
        """Collect the samples of a step into `step.experience`.

        Samples that `admit` started are taken first, in the order of their prompts (but see `Trainer.over_sampling`).
        Missing samples are generated and scored now. A run on a dataset's examples (`Trainer.examples`) takes `data.train_batch_size`
        examples.

        Raises:
            PluginBrokenError: the rollout's weights are out of date: `publish_weights` was not called yet, or was last called more
                than `Trainer.max_staleness` steps ago.
            PluginBrokenError: `step` is not the running step, or already has its samples.
            RewardError: scoring failed for more than the share `reward.max_failure_share` of the samples.
        """

    @abstractmethod
    def learn(self, step: StepContext) -> None:
        """Run the stages of the plan over the step's experience: scores, checks, advantages, updates.

        Raises:
            NumericsError: a number is not finite, or rollout and trainer differ by more than the config allows.
            PluginBrokenError: `step` has no experience, was learned from before, or is not the running step.
            PluginBrokenError: a stage does not return the columns that it declares.
        """

    @abstractmethod
    def publish_weights(self) -> None:
        """Send the actor's weights to every rollout replica as a new version, after running requests have ended.

        No effect if the weights have not changed, or in a run on a dataset's examples.

        Raises:
            WeightSyncError: a replica did not accept the weights, even after a restart.
        """

    @abstractmethod
    def validate(self) -> Mapping[str, float]:
        """Return the metrics of held-out prompts, scored with the rollout's weights; empty if the config names no such prompts.

        A run on a dataset's examples returns the losses on held-out examples.

        Raises:
            PluginBrokenError: a step is running (validate after its block), or the rollout's weights are too old (see `collect`).
        """

    @abstractmethod
    def save(self) -> None:
        """Write a checkpoint of the finished steps, the trainer's `state()` included. No effect if this checkpoint exists already.

        The run itself saves when `Trainer.run` returns (unless `trainer.save_last` is false), is stopped or fails.

        Raises:
            PluginBrokenError: a step is running (save after its block).
        """
