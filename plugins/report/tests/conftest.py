"""A run directory, empty or as a run of a few steps leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.telemetry import RunDirectory
from dovetail_sdk.testing import finished_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A claimed, empty run directory."""
    return RunDirectory.create(tmp_path / "runs" / "arithmetic" / "first")


@pytest.fixture
def finished(run: RunDirectory) -> RunDirectory:
    """A run of six steps."""
    return finished_run(run)
