"""TensorboardTracker: writes event files for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail_trackers.background import BackgroundTracker, TrackedRun, as_markdown, columns_of
from dovetail_trackers.config import TensorboardConfig


class TensorboardTracker(BackgroundTracker):
    """Writes event files into the folder `tensorboard` of the run directory.

    A resumed run makes TensorBoard drop the values logged after the step from which the run continues.
    """

    name = "tensorboard"
    Config = TensorboardConfig
    module = "tensorboard"
    rewinds = True

    def open_run(self, run: TrackedRun) -> str:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.directory / "tensorboard"
        # A run that starts anew purges step 0 too, which a validation before the first step may have logged.
        purge = run.start_step + 1 if run.start_step else 0
        self._writer = SummaryWriter(str(folder), purge_step=purge if folder.exists() else None)
        texts = {file.name: _as_code(file.read_text(encoding="utf-8")) for file in run.files}
        texts |= {"notes": self.config.notes, "tags": ", ".join(self.config.tags)}
        for name, text in texts.items():
            if text:
                self._writer.add_text(f"run/{name}", text, run.start_step)
        self._writer.flush()
        return "tensorboard"

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        # Flush now, so that a killed run loses nothing that it logged before its last checkpoint.
        self._writer.flush()

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._writer.add_text("samples", as_markdown(rows, columns_of(rows)), step)

    def end_run(self, status: str) -> None:
        self._writer.close()


def _as_code(text: str) -> str:
    """Return a text as a Markdown code block (lines with four spaces), which TensorBoard shows unchanged."""
    return "\n".join(f"    {line}" for line in text.splitlines())
