"""KlController: adapts the weight of a KL penalty during a run."""

from __future__ import annotations

from abc import abstractmethod

from dovetail.interfaces.plugin import Plugin


class KlController(Plugin):
    """Holds a factor on the KL section's `coef`, and changes the factor after each step. Checkpoints keep the controller's state."""

    @property
    @abstractmethod
    def value(self) -> float:
        """The current factor on `coef`; 1 at the start of a run."""

    @abstractmethod
    def update(self, kl: float, samples: int) -> None:
        """Update the factor from a step's mean KL, in nats per token, over `samples` samples."""
