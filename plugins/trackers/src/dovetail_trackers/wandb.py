"""WandbTracker: logs to Weights & Biases."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail_trackers.background import BackgroundTracker, TrackedRun, TrackerError, columns_of
from dovetail_trackers.config import WandbConfig

FLUSH_SECONDS = 0.5
"""Seconds between writes to the run's file; a killed process loses at most the values of this time."""


class WandbTracker(BackgroundTracker):
    """Logs to Weights & Biases, or offline below the run directory.

    The x axis is the metric `step`. W&B's own step is not used: it would delay each row until the next step begins, and drop rows of
    earlier steps.
    """

    name = "wandb"
    Config = WandbConfig
    module = "wandb"
    settle_seconds = 2 * FLUSH_SECONDS

    def open_run(self, run: TrackedRun) -> str:
        import wandb

        settings: dict[str, Any] = {"silent": True, "console": "off"}
        # By default W&B keeps 15 seconds in memory, which a killed run would lose; older versions have no such setting.
        if "x_transaction_log_flush_interval" in wandb.Settings.model_fields:
            settings["x_transaction_log_flush_interval"] = FLUSH_SECONDS
        online = self.config.mode == "online"
        # Without `prompt=False`, W&B would ask for a login on the terminal and block the tracker.
        if online and not wandb.login(prompt=False):
            raise TrackerError(
                "the tracker wandb is not logged in to W&B on this machine",
                hint="run `wandb login`, set WANDB_API_KEY, or set the tracker's mode=offline",
            )
        self._logged_to = wandb.init(
            project=run.project,
            name=run.name,
            entity=self.config.entity,
            id=run.run_id or uuid.uuid4().hex[:8],
            resume="allow" if online else None,
            mode=self.config.mode,
            dir=str(run.directory),
            config=dict(run.config),
            tags=self.config.tags or None,
            notes=self.config.notes or None,
            reinit="create_new",
            settings=wandb.Settings(**settings),
        )
        self._logged_to.define_metric("step", hidden=True)
        self._logged_to.define_metric("*", step_metric="step")
        artifact = wandb.Artifact(f"run-{self._logged_to.id}", type="dovetail")
        for file in run.files:
            artifact.add_file(str(file))
        self._logged_to.log_artifact(artifact)
        return str(self._logged_to.id)

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._logged_to.log({**metrics, "step": step})

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        columns = columns_of(rows)
        data = [[_cell(row.get(column)) for column in columns] for row in rows]
        table = wandb.Table(columns=columns, data=data)
        self._logged_to.log({"samples": table, "step": step})

    def end_run(self, status: str) -> None:
        self._logged_to.finish(exit_code=int(status == "failed"))


def _cell(value: object) -> object:
    """Return a value as text, since a table's columns must each have one type."""
    if value is None or isinstance(value, float | int | str):
        return value if isinstance(value, str) else json.dumps(value)
    return json.dumps(value, default=str)
