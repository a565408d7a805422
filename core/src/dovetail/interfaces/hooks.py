"""HookSpec: what can be observed of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class HookSpec:
    """Everything that can be observed. Arguments are for reading: an observer changes none of them."""

    def run_started(
        self, config: Any, plan: Any, directory: Path, start_step: int, total_steps: int
    ) -> None:
        """Handle the start of a run: its whole `RunConfig`, the `Plan` of a step, the run directory, the steps that were finished before
        (0 unless it is resumed), and those of the whole run.
        """

    def run_finished(self, summary: Mapping[str, Any]) -> None:
        """Handle the end of the run, good or bad. `summary` is what `summary.json` holds by now, `status` among it."""

    def step_started(self, step: int) -> None:
        """Handle the start of a step; the first is 1."""

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle the end of a step, with all of its metrics."""

    def phase_started(self, step: int, phase: str) -> None:
        """Handle the start of a phase, such as `rollout`, `update_actor`, `weight_sync` or `validation`, after so many finished steps."""

    def metrics_logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step, or of the validation after it, in the field's names (`reward/mean`, `actor/pg_loss`, `val/mean@1`, …)."""

    def samples_logged(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take some samples of a step, as `samples/` holds them, without tokens: each with prompt, response and score."""

    def rollout_finished(self, step: int, samples: Sequence[Any]) -> None:
        """Handle the end of a rollout: all samples of the step are generated and scored; each has its prompt, completion and outcome."""

    def reward_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle the end of scoring, which passed its checks; the step's metrics so far (`reward/mean`, `reward/failures`, …)."""

    def stage_finished(self, step: int, stage: str, before: Any, after: Any) -> None:
        """Handle the end of a stage: the `Batch` that it was given, and the one that it returned."""

    def update_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle the end of all updates, so that the step counts; their metrics (`actor/…`, `critic/…`)."""

    def checkpoint_saved(self, step: int, path: Path) -> None:
        """Handle a complete checkpoint of so many finished steps, which lies at `path`."""

    def model_exported(self, step: int, path: Path) -> None:
        """Handle the export of the trained model after so many finished steps: it lies at `path` in the run directory, in Hugging Face format."""

    def failure(self, step: int, error: BaseException) -> None:
        """Handle the error that a run fails with after so many finished steps; `run_finished` follows."""

    def given_up(self, directory: Path, step: int, total_steps: int | None, cause: str) -> None:
        """Handle the end of a run's supervisor (`trainer.run_restarts`) without it: the last step that was reached, the steps of the
        whole run where they are known, and why the last process ended. The only hook outside of the process that trains, which
        may have been killed; an observer that has it hears of no other there.
        """
