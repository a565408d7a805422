"""LearningWarnings: the observer that warns during training of conditions that keep the run from learning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dovetail.hooks import hookimpl
from dovetail.interfaces import Logger
from dovetail.telemetry import get_logger, read_rows
from dovetail_diagnosis.diagnosis import RunDiagnosis, diagnose


class LearningWarnings:
    """Observer that logs each warning of `RunDiagnosis` when it begins, and the active warnings when the run ends.

    Args:
        logger: a logger with the standard methods; by default the run's logger.
    """

    def __init__(self, logger: Logger = None) -> None:
        self._logger = get_logger() if logger is None else logger
        self._diagnosis = RunDiagnosis()

    @hookimpl
    def run_started(self, directory: Path) -> None:
        """Read the metrics logged before the run was resumed."""
        self._diagnosis = diagnose(read_rows(directory / "metrics.jsonl"))

    @hookimpl
    def metrics_logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the warnings that begin with this step, or with the validation after it."""
        for warning in self._diagnosis.observe(step, metrics):
            self._logger.warning(
                warning.message,
                warning=warning.name,
                hint=warning.hint,
                key=warning.key,
                see=warning.page,
            )

    @hookimpl
    def run_finished(self) -> None:
        """Log the warnings that have not ended, each with the step at which its condition began."""
        if rest := self._diagnosis.in_force.values():
            since = ", ".join(f"{warning.name} since step {warning.first}" for warning in rest)
            self._logger.warning("the run ended while warnings were still active", warnings=since)
