"""Tracker: where a run's metrics and samples go."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.interfaces.plugin import Plugin

TRACKER_API = "1.0"


class Tracker(Plugin):
    """Receives figures. A tracker that fails is reported and stops no run."""

    def begin(self, run: Mapping[str, Any]) -> None:
        """The run starts; `run` holds `config`, `plan`, `directory`, `start_step`, `total_steps`."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Figures of one step, in the field's names (`reward/mean`, `actor/pg_loss`, `perf/…`)."""

    def phase(self, step: int, name: str) -> None:
        """A phase begins, such as `rollout`, `old_log_probs`, `update`, `weight_sync` or `validation`."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Some samples of a step, each with prompt, response and score."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run ended, well or not; `summary` is what `summary.json` holds."""
