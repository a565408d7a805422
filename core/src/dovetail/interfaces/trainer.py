"""Trainer: the schedule of a run."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dovetail.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from dovetail.interfaces.run import Run

TRAINER_API = "2.0"


class Trainer(Plugin):
    """Decides what a run does next: admit, collect, learn, publish, validate, save.

    The capability `off_policy` says that it collects with weights that are older than the actor's. Its `state()` is in every
    checkpoint.
    """

    max_staleness: int = 0
    """How many steps ahead of the one that learns samples may be generated (`Run.admit`), so that weights which are so many
    updates old have made them: 0 for none. A property where the config decides."""

    @abstractmethod
    def run(self, run: Run) -> None:
        """Train from where the run stands to its end.

        Args:
            run: fresh, or resumed from a checkpoint; `run.position` says which step is next.
        """
