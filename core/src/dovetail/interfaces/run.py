"""Run: what a trainer drives."""

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
    """The position of a run: its finished steps."""

    step: int
    """Finished steps."""
    total_steps: int
    """Steps of the whole run."""
    epoch: float
    """Passes over the training prompts so far."""
    weight_version: int
    """Version of the weights that the rollout holds; 0 in a fresh run, before the first publication."""
    validated: bool
    """Whether the run has been validated before its first step, or is past it."""
    admissible: int = 0
    """Prompts that `Run.admit` takes now: as many as the trainer's `max_staleness` or `over_sampling` leaves room for, and the steps that
    are left need."""

    @property
    def finished(self) -> bool:
        """Whether every step is done."""
        return self.step >= self.total_steps


class Run(ABC):
    """A run as its trainer sees it: its position, and methods that continue it.

    A trainer calls these methods in an order of its own, one after another, from one thread:

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
    raise StopRequested where the user has asked for a stop; a trainer lets it pass. The trainer itself must follow the keys
    `validate_every`, `save_every`, `validate_before` and `validate_after` of its section, as `self.config.validate_every`.
    """

    @property
    @abstractmethod
    def position(self) -> RunPosition:
        """The current position."""

    @abstractmethod
    def step(self) -> AbstractContextManager[StepContext]:
        """Surround one step. The step counts once `learn` is complete.

        An error before that undoes the step: the next step takes its samples, or the next run its prompts.

        `position` moves when the block ends.

        Raises:
            PluginBrokenError: the block ended without an error and without `learn`, a step is under way already, or the
                run is finished.
        """

    @abstractmethod
    def admit(self, groups: int | None = None) -> None:
        """Start generating and scoring samples for the next prompts, with the rollout's current weights, and return at once. Without effect
        in a run on a dataset's examples.

        Later calls of `collect` take them, in this order. Without effect where the remaining steps have all their prompts.

        Args:
            groups: the number of prompts; by default those of a step (`data.train_batch_size`).

        Raises:
            PluginBrokenError: too many prompts would be outstanding: admitted, but not yet learned from and followed by
                `publish_weights`. The limit is (`Trainer.max_staleness` + 1) · `data.train_batch_size`, or the lower one of
                `Trainer.over_sampling`. Or the rollout's weights are too old, as for `collect`.
        """

    @abstractmethod
    def collect(self, step: StepContext) -> None:
        """Take the samples of a step, and set `step.experience`: admitted ones first (but see `Trainer.over_sampling`), the missing ones
        are generated and scored now. In a run on a dataset's examples (`Trainer.examples`), take `data.train_batch_size` examples.

        Raises:
            PluginBrokenError: the rollout holds weights from more than `Trainer.max_staleness` steps ago, or none that
                `publish_weights` has sent.
            PluginBrokenError: `step` is not the one that is under way, or already has its samples.
            RewardError: more than `reward.max_failure_share` of the samples could not be scored.
        """

    @abstractmethod
    def learn(self, step: StepContext) -> None:
        """Run the stages of the plan over the step's experience: scores, checks, advantages, updates.

        Raises:
            NumericsError: a number is not finite, or rollout and trainer differ by more than is allowed.
            PluginBrokenError: `step` has no experience, was learned from before, or is not the one that is under way; a stage does not return what it declares.
        """

    @abstractmethod
    def publish_weights(self) -> None:
        """Send the actor's weights to every rollout replica as a new version, after running requests have ended.

        Without effect where the weights have not changed, and in a run on a dataset's examples.

        Raises:
            WeightSyncError: a replica did not take the weights, not even after a restart.
        """

    @abstractmethod
    def validate(self) -> Mapping[str, float]:
        """Score held-out prompts with the rollout's weights, and return the metrics; empty where the config names none. In a run on a
        dataset's examples, return the losses on held-out examples.

        Raises:
            PluginBrokenError: a step is under way: validate after its block; or the rollout's weights are too old, as for `collect`.
        """

    @abstractmethod
    def save(self) -> None:
        """Write a checkpoint of the finished steps, the trainer's `state()` included; without effect where one exists already.

        A run calls it itself where `Trainer.run` returns (unless `trainer.save_last` is false), is stopped or fails.

        Raises:
            PluginBrokenError: a step is under way: save after its block.
        """
