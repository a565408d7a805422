"""Trainer: the loop over steps."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from dovetail.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from collections.abc import Mapping

TRAINER_API = "1.0"


class Trainer(Plugin):
    """Runs the data flow. `flow` gives it the stages that the planner found necessary."""

    @abstractmethod
    def run(self, flow: Any) -> Mapping[str, Any]:
        """Train to the end and return what `summary.json` holds."""
