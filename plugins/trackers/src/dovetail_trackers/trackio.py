"""TrackioTracker: logs to trackio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail_trackers.background import BackgroundTracker, TrackedRun, as_markdown, columns_of
from dovetail_trackers.config import TrackioConfig


class TrackioTracker(BackgroundTracker):
    """Logs to trackio's store on this machine (`TRACKIO_DIR`), or to a Hugging Face Space."""

    name = "trackio"
    Config = TrackioConfig
    module = "trackio"

    def open_run(self, run: TrackedRun) -> str:
        import trackio

        about = {"tags": list(self.config.tags), "notes": self.config.notes}
        self._logged_to = trackio.init(
            project=run.project,
            name=run.name,
            config={**run.config, "run": {k: v for k, v in about.items() if v}},
            space_id=self.config.space_id,
            resume="allow" if run.run_id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        for file in run.files:
            trackio.log_artifact(file, name=f"{run.name}-{file.name}", type="dovetail")
        return str(self._logged_to.id)

    def logged_steps(self, run: TrackedRun) -> Mapping[str, int] | None:
        # Read the steps from trackio's store: trackio writes half a second late, so a killed process has lost the last values.
        if self.config.space_id is not None:
            return None
        from trackio.sqlite_storage import SQLiteStorage

        steps: dict[str, int] = {}
        for row in SQLiteStorage.get_logs(run.project, run.name, run_id=run.run_id):
            steps |= dict.fromkeys(row, row["step"])
        return steps

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._logged_to.log(dict(metrics), step=step)

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import trackio

        table = trackio.Markdown(as_markdown(rows, columns_of(rows)))
        self._logged_to.log({"samples": table}, step=step)

    def end_run(self, status: str) -> None:
        self._logged_to.finish()
