"""The reward function for MATH and similar datasets: 1 for a right answer, else 0."""

from __future__ import annotations

from typing import Any

from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.boxes import last_boxed_only_string, remove_boxed

__all__ = ["compute_score", "last_boxed_only_string", "remove_boxed"]


def compute_score(solution_str: str, ground_truth: Any) -> float:
    """Return 1 if the answer in the response's last LaTeX command `boxed` equals the ground truth, else 0."""
    found = default_compute_score("lighteval/MATH", solution_str, ground_truth)
    return float(found["score"] if isinstance(found, dict) else found)
