"""Trainer: the schedule of a run."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal

from dovetail.interfaces.plugin import Plugin, PluginConfig

if TYPE_CHECKING:
    from dovetail.interfaces.run import Run


Examples = Literal["prompts", "conversations", "preferences", "unpaired_preferences"]
"""The examples that a step takes. `prompts`: scored samples that the rollout generates for prompts. `conversations`: turns of a dataset.
`preferences`: pairs of answers to one prompt, of which one is preferred. `unpaired_preferences`: single answers, each of which is
desirable or not."""


class Trainer(Plugin):
    """Decides what a run does next: admit, collect, learn, publish, validate, save. Its `state()` is in every checkpoint."""

    @classmethod
    def max_staleness(cls, config: PluginConfig) -> int:
        """Return the maximum age, in steps, of the weights that generate a step's samples.

        0 is on-policy. 1 lets the next step's samples be generated while a step learns (`Run.admit`). Where weights are sent
        after every k steps, samples that are at most s versions old are at most (s + 1) · k − 1 steps old. Above 0 and without
        a rollout correction, losses use the rollout's policy as the old policy.
        """
        return 0

    @classmethod
    def over_sampling(cls, config: PluginConfig) -> float | None:
        """Return how many steps' prompts may be outstanding: admitted, or in a step that no publication of weights has followed.

        The number of prompts is the product with a step's prompts, rounded. None means `max_staleness` + 1, and every step takes the groups
        that were admitted first. With a lower number, a step takes groups that finish first, as long as the skipped ones can still be
        trained on within `max_staleness`.
        """
        return None

    @classmethod
    def sync_every(cls, config: PluginConfig) -> int:
        """Return the number of steps between two publications of weights, for `dovetail plan --from-run`."""
        return 1

    @classmethod
    def examples(cls, config: PluginConfig) -> Examples:
        """Return the kind of examples that a step of its runs takes."""
        return "prompts"

    @classmethod
    def source(cls, config: PluginConfig) -> str:
        """Return the name of the source of its runs, where the key `source` selects no other.

        Under `examples` a run has no rollout, no rewards and no weight transport: `Run.collect` takes examples of the dataset, `validate`
        computes the loss on held-out examples, and `admit` and `publish_weights` do nothing.
        """
        return "rollouts" if cls.examples(config) == "prompts" else "examples"

    @abstractmethod
    def run(self, run: Run) -> None:
        """Train from the current position to the end of the run.

        Args:
            run: fresh, or resumed from a checkpoint; `run.position` says which step is next.
        """
