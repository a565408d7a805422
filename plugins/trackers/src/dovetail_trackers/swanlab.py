"""SwanlabTracker: logs to SwanLab."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail_trackers.background import BackgroundTracker, TrackedRun, as_markdown, columns_of
from dovetail_trackers.config import SwanlabConfig

_ENDS = {"completed": "success", "failed": "crashed"}


class SwanlabTracker(BackgroundTracker):
    """Logs to SwanLab, or offline below the run directory.

    Offline, each start of a run writes a separate folder with the same run id. SwanLab drops a second value of a metric at the same step,
    also in `swanlab sync`.
    """

    name = "swanlab"
    Config = SwanlabConfig
    module = "swanlab"
    rewinds = True

    def open_run(self, run: TrackedRun) -> str:
        import swanlab

        self._logged_to = swanlab.init(
            mode=self.config.mode,
            log_dir=str(run.directory / "swanlog"),
            workspace=self.config.workspace,
            project=run.project,
            name=run.name,
            description=self.config.notes or None,
            tags=list(self.config.tags) or None,
            id=run.run_id or uuid.uuid4().hex[:21],
            resume="allow",
            config=dict(run.config),
            # Don't ask for a login, and don't capture the terminal's output.
            settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
        )
        for file in run.files:
            if file.name == "config.yaml":
                continue  # SwanLab writes its own file of this name
            self._logged_to.save(str(file), base_path=str(run.directory), policy="now")
        return str(self._logged_to.id)

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._logged_to.log(dict(metrics), step=step)

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import swanlab

        table = swanlab.Text(as_markdown(rows, columns_of(rows)))
        self._logged_to.log({"samples": table}, step=step)

    def end_run(self, status: str) -> None:
        self._logged_to.finish(state=_ENDS.get(status, "aborted"))
