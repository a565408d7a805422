"""Trainer: the schedule of a run."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from dovetail.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from dovetail.interfaces.run import Run

TRAINER_API = "2.0"


class Trainer(Plugin):
    """Decides what a run does next: admit, collect, learn, publish, validate, save. Its `state()` is in every checkpoint."""

    @classmethod
    def max_staleness(cls, config: Any) -> int:
        """Return from how many steps ago the weights may be that generate a step's samples.

        0 is on-policy. 1 lets the next step's samples be generated while a step learns (`Run.admit`). Above 0 and without a
        rollout correction, losses take the rollout's policy for the old one.
        """
        return 0

    @abstractmethod
    def run(self, run: Run) -> None:
        """Train from where the run stands to its end.

        Args:
            run: fresh, or resumed from a checkpoint; `run.position` says which step is next.
        """
