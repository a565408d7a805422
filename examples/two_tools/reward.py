"""1 where the last turn is the right number and nothing else."""

from __future__ import annotations

from typing import Any


def compute_score(ground_truth: str, trajectory: dict[str, Any]) -> float:
    """Score an episode by its last turn."""
    return float(trajectory["turns"][-1]["text"].strip() == ground_truth)
