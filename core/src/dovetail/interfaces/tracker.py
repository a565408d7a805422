"""Tracker: an observer that a config selects, such as one that shows metrics or sends them somewhere."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from dovetail.interfaces.hooks import HookSpec
from dovetail.interfaces.plugin import Plugin


class Tracker(HookSpec, Plugin):
    """Observes a run by overriding hooks; the config's `tracking` selects trackers. An error in a hook is reported; the run continues."""

    @abstractmethod
    def metrics_logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, or of the validation after the step, by name (`reward/mean`, `actor/pg_loss`, `val/mean@1`, …)."""
