"""MlflowTracker: logs to MLflow."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from time import time
from typing import Any

from dovetail_trackers.background import BackgroundTracker, TrackedRun
from dovetail_trackers.config import MlflowConfig

_ENDS = {"completed": "FINISHED", "failed": "FAILED"}
_LONGEST = 6000
"""Maximum length of a parameter in MLflow, in characters."""


class MlflowTracker(BackgroundTracker):
    """Logs to an MLflow server, or to a folder.

    MLflow refuses some characters in names: `val/mean@1` is logged as `val/mean_at_1`, and other characters become `_`. In a folder, each
    metric is a file, so `.` replaces `/`: otherwise `time/rollout` would be both a file and the folder of `time/rollout/wait`.
    """

    name = "mlflow"
    Config = MlflowConfig
    module = "mlflow"

    def open_run(self, run: TrackedRun) -> str:
        store = self.config.uri or os.environ.get("MLFLOW_TRACKING_URI")
        if store is None:
            store = (run.directory.parent.parent / "mlruns").resolve().as_uri()
        self._separator = "." if store.startswith("file:") else "/"
        if self._separator == ".":
            # MLflow accepts a folder as store only with this variable; mlflow-skinny has no other local store.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._client = client = MlflowClient(tracking_uri=store)
        found = client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else client.create_experiment(run.project)
        self._id = ""
        if run.run_id is not None:
            try:
                if client.get_run(run.run_id).info.experiment_id == experiment:
                    self._id = run.run_id
                    client.update_run(run.run_id, status="RUNNING")
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        if not self._id:
            tags = dict(tag.split("=", 1) if "=" in tag else (tag, "") for tag in self.config.tags)
            tags |= {"mlflow.note.content": self.config.notes} if self.config.notes else {}
            self._id = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
            params = [Param(_name(k), str(v)[:_LONGEST]) for k, v in _flat(run.config)]
            for some in _parts(params, 100):
                client.log_batch(self._id, params=some)
        for file in run.files:
            client.log_artifact(self._id, str(file))
        return self._id

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time() * 1000)
        values = [
            Metric(_name(name.replace("/", self._separator)), value, now, step)
            for name, value in metrics.items()
        ]
        for some in _parts(values, 1000):
            self._client.log_batch(self._id, metrics=some)

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = (json.dumps(row, default=str, ensure_ascii=False) for row in rows)
        self._client.log_text(self._id, "\n".join(lines), f"samples/step_{step}.jsonl")

    def end_run(self, status: str) -> None:
        self._client.set_terminated(self._id, _ENDS.get(status, "KILLED"))


def _name(name: str) -> str:
    """Return a name with only those characters that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their key paths."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _parts(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (values[i : i + size] for i in range(0, len(values), size))
