"""KlController: how the weight of a KL penalty moves over time."""

from __future__ import annotations

from abc import abstractmethod

from dovetail.interfaces.plugin import Plugin


class KlController(Plugin):
    """Holds a factor that multiplies the section's `coef`, and moves it after each step. Its state is checkpointed."""

    @property
    @abstractmethod
    def value(self) -> float:
        """The factor now; 1 at the start of a run."""

    @abstractmethod
    def update(self, kl: float, samples: int) -> None:
        """Take this step's mean KL, in nats a token, over `samples` samples."""
