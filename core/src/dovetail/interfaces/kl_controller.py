"""KlController: adapts the weight of a KL penalty during a run."""

from __future__ import annotations

from abc import abstractmethod

from dovetail.interfaces.plugin import Plugin


class KlController(Plugin):
    """Holds a factor that multiplies the `coef` of a KL penalty, and updates the factor after each step. Checkpoints keep the state."""

    @property
    @abstractmethod
    def value(self) -> float:
        """The current factor on `coef`; 1 at the start of a run."""

    @abstractmethod
    def update(self, kl: float, samples: int) -> None:
        """Update the factor from a step's mean KL, in nats per token, over `samples` samples."""
