"""Trainer: the schedule of a run."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal

from dovetail.interfaces.plugin import Plugin, PluginConfig

if TYPE_CHECKING:
    from dovetail.interfaces.run import Run


Examples = Literal["prompts", "conversations", "preferences", "unpaired_preferences"]
"""The examples that a step takes. `prompts`: scored samples that the rollout generates for prompts. `conversations`: turns of a dataset.
`preferences`: pairs of answers to one prompt, one of them preferred. `unpaired_preferences`: single answers, each either desirable or
undesirable."""


class Trainer(Plugin):
    """Decides what a run does next: admit, collect, learn, publish, validate, save. Checkpoints keep the trainer's `state()`."""

    @classmethod
    def max_staleness(cls, config: PluginConfig) -> int:
        """Return the maximum age, in steps, of the weights that generate a step's samples.

        0 is on-policy. 1 lets the next step's samples be generated while a step learns (`Run.admit`). If weights are sent
        after every k steps, samples that are at most s versions old are at most (s + 1) · k − 1 steps old. Above 0 and without
        a rollout correction, losses use the rollout's policy as the old policy.
        """
        return 0

    @classmethod
    def over_sampling(cls, config: PluginConfig) -> float | None:
        """Return the maximum number of outstanding prompts, divided by the number of prompts of a step.

        A prompt is outstanding from `Run.admit` until weights are published after the step that trained on its samples. The maximum is
        rounded to whole prompts. None means `max_staleness` + 1: every step takes the samples of the prompts that were admitted first.
        With a lower number, a step takes the samples of the prompts that finish first, as long as skipped prompts can still be trained
        on within `max_staleness`.
        """
        return None

    @classmethod
    def sync_every(cls, config: PluginConfig) -> int:
        """Return the number of steps between two publications of weights, for `dovetail plan --from-run`."""
        return 1

    @classmethod
    def examples(cls, config: PluginConfig) -> Examples:
        """Return what a step takes: the samples of prompts, or one of three kinds of a dataset's examples (see `Examples`)."""
        return "prompts"

    @classmethod
    def source(cls, config: PluginConfig) -> str:
        """Return the name of the experience source that a run uses if the key `source` selects none.

        With the source `examples`, a run has no rollout, rewards or weight transport. `Run.collect` then takes examples of the dataset,
        `validate` computes the loss on held-out examples, and `admit` and `publish_weights` do nothing.
        """
        return "rollouts" if cls.examples(config) == "prompts" else "examples"

    @abstractmethod
    def run(self, run: Run) -> None:
        """Train from the current position to the end of the run.

        Args:
            run: the run, fresh or resumed from a checkpoint; `run.position` says which step is next.
        """
