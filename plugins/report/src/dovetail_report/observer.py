"""ReportWriter: the observer that keeps `report.html` in a run directory up to date."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

from dovetail.hooks import hookimpl
from dovetail_report.page import write_report

_SECONDS_BETWEEN = 30.0
"""Minimum seconds between two reports of an active run."""
_SHARE = 0.02
"""Maximum share of a run's time that is spent on reports."""


class ReportWriter:
    """Observer that writes the report during a run and at the end, successful or not."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._due = 0.0

    @hookimpl
    def run_started(self, directory: Path) -> None:
        """Record the run directory."""
        self._directory, self._due = directory, monotonic() + _SECONDS_BETWEEN

    @hookimpl
    def step_finished(self) -> None:
        """Write the report if enough time has passed since the previous report was written."""
        if monotonic() >= self._due:
            self._write()

    @hookimpl
    def run_finished(self) -> None:
        """Write the report of the whole run."""
        self._write()

    def _write(self) -> None:
        if self._directory is None:
            return
        began = monotonic()
        try:
            write_report(self._directory)
        finally:  # a failed report is not retried at every step
            ended = monotonic()
            self._due = ended + max(_SECONDS_BETWEEN, (ended - began) / _SHARE)
