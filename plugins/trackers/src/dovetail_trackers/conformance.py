"""The conformance suites of this package's plugins, which `dovetail plugins check` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from dovetail_sdk.testing.conformance import TrackerConformance
from dovetail_trackers.alerts import AlertsTracker
from dovetail_trackers.background import BackgroundTracker
from dovetail_trackers.config import AlertsConfig, SwanlabConfig, WandbConfig
from dovetail_trackers.mlflow import MlflowTracker
from dovetail_trackers.opentelemetry import OpentelemetryTracker
from dovetail_trackers.swanlab import SwanlabTracker
from dovetail_trackers.tensorboard import TensorboardTracker
from dovetail_trackers.trackio import TrackioTracker
from dovetail_trackers.wandb import WandbTracker


class _Suite(TrackerConformance):
    plugin: ClassVar[type[BackgroundTracker]]

    @pytest.fixture(autouse=True)
    def _local(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))

    def make(self, **context: Any) -> Any:
        """Make a plugin without starting it; skip the test if the library is not installed."""
        if not self.plugin.installed():
            pytest.skip(f"{self.plugin.module} is not installed")
        return super().make(**context)


TestAlerts = TrackerConformance.of(AlertsTracker, AlertsConfig(name="alerts", command=("true",)))
TestWandb = _Suite.of(WandbTracker, WandbConfig(name="wandb", mode="offline"))
TestMlflow = _Suite.of(MlflowTracker)
TestTensorboard = _Suite.of(TensorboardTracker)
TestSwanlab = _Suite.of(SwanlabTracker, SwanlabConfig(name="swanlab", mode="offline"))
TestTrackio = _Suite.of(TrackioTracker)
TestOpentelemetry = _Suite.of(OpentelemetryTracker)
