"""LearningWarnings: the observer that says while a run trains that it can't learn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dovetail.hooks import hookimpl
from dovetail.interfaces.plugin import Logger
from dovetail.telemetry.diagnostics import Diagnostics
from dovetail.telemetry.jsonl import read_rows


class LearningWarnings:
    """Logs each warning of `Diagnostics` when it begins, and names at the end those that are in force.

    Args:
        logger: with the standard methods.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._diagnostics = Diagnostics()

    @hookimpl
    def run_started(self, directory: Path) -> None:
        """Take what the run logged before it was resumed."""
        for row in read_rows(directory / "metrics.jsonl"):
            self._diagnostics.observe(int(row.get("step", 0)), row)

    @hookimpl
    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the warnings that begin with this step."""
        for warning in self._diagnostics.observe(step, metrics):
            self._logger.warning(warning.message, warning=warning.name, hint=warning.hint)

    @hookimpl
    def run_finished(self) -> None:
        """Name the warnings in force, which may have been logged long ago."""
        if rest := self._diagnostics.in_force.values():
            since = ", ".join(f"{warning.name} since step {warning.first}" for warning in rest)
            self._logger.warning("the run ended with warnings in force", warnings=since)
