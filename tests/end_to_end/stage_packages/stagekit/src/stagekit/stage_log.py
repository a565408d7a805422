"""StageLog: writes which columns each stage changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.hooks import hookimpl


class StageLog:
    """One line of `stages.jsonl` in the output directory for each stage that ran."""

    @hookimpl
    def run_started(self, config: Any) -> None:
        """Remember where to write."""
        self._file = Path(config.output_dir) / config.project / config.experiment / "stages.jsonl"

    @hookimpl
    def stage_finished(self, step: int, stage: str, before: Any, after: Any) -> None:
        """Write the names of the columns that are new or other than before, and the mean score."""
        same = [name for name in before.names if after[name] is before[name]]
        line = {
            "step": step,
            "stage": stage,
            "changed": sorted(set(after.names) - set(same)),
            "score": float(after["scores"].mean()),
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
