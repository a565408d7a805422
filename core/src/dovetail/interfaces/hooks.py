"""HookSpec: the events of a run that observers can handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class HookSpec:
    """Observes a run: one method for each event. Arguments are read-only."""

    def run_started(
        self, config: Any, plan: Any, directory: Path, start_step: int, total_steps: int
    ) -> None:
        """Handle the start of a run with its `RunConfig`, the `Plan` of a step and the run directory.

        `start_step` is the number of steps already finished, 0 unless the run is resumed.
        """

    def run_finished(self, summary: Mapping[str, Any]) -> None:
        """Handle the end of the run, also after an error. `summary` is the content of `summary.json`, with `status`."""

    def step_started(self, step: int) -> None:
        """Handle the start of a step. The first step has the number 1."""

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle the end of a step, with all of its metrics."""

    def phase_started(self, step: int, phase: str) -> None:
        """Handle the start of a phase (`rollout`, `update_actor`, `validation`, …). `step` is the number of finished steps."""

    def metrics_logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle the metrics of a step, or of the validation after the step, by name (`reward/mean`, `actor/pg_loss`, `val/mean@1`, …)."""

    def samples_logged(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Handle some samples of a step, as the files in `samples/` hold them: with prompt, response and score, without tokens."""

    def rollout_finished(self, step: int, samples: Sequence[Any]) -> None:
        """Handle a step's samples after all are generated and scored; each has its prompt, completion and outcome: a score or failure."""

    def reward_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle the end of scoring, after the share of failures was checked.

        `metrics` are the step's metrics so far (`reward/mean`, `reward/failures`, …).
        """

    def stage_finished(self, step: int, stage: str, before: Any, after: Any) -> None:
        """Handle the end of a stage, with its input and its output `Batch`."""

    def update_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle the end of a step's updates, after which the step counts as finished; `metrics` has `actor/…`, `critic/…`."""

    def checkpoint_saved(self, step: int, path: Path) -> None:
        """Handle a complete checkpoint, written to `path` after `step` finished steps."""

    def model_exported(self, step: int, path: Path) -> None:
        """Handle the export of the trained model after `step` finished steps: `path` is in the run directory, in Hugging Face format."""

    def failure(self, step: int, error: BaseException) -> None:
        """Handle the error that ends a run after `step` finished steps; `run_finished` follows."""

    def given_up(self, directory: Path, step: int, total_steps: int | None, cause: str) -> None:
        """Handle the decision of the supervisor (`trainer.run_restarts`) not to restart a run that failed.

        `step` is the last step that was reached, and `cause` says why the last process ended. `total_steps` is None if unknown. Only
        this hook is called in the supervisor's process.
        """
