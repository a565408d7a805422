"""KeepBatches: a stage that keeps what each step trains on, in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dovetail.batch import Batch
from dovetail.interfaces import Stage

COLUMNS = (
    "prompt_ids",
    "response_ids",
    "response_mask",
    "rollout_log_probs",
    "token_weight_versions",
)


class KeepBatches(Stage):
    """Writes `step_N.npz` into the run's `output_dir`: `trajectory_id`, and the columns `COLUMNS` with their offsets."""

    phase = "check"

    @classmethod
    def requires(cls, config: Any, facts: Any) -> set[str]:
        return {*COLUMNS, "trajectory_id"}

    def run(self, batch: Batch, step: Any) -> Batch:
        kept = {"trajectory_id": batch["trajectory_id"]}
        for name in COLUMNS:
            kept |= {name: batch[name].values, f"{name}/offsets": batch[name].offsets}
        np.savez(Path(step.config.output_dir) / f"step_{step.number}.npz", **kept)
        return batch
