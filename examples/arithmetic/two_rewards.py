"""A reward of two named parts, for algorithms that weigh them apart: the right number, and the form of the answer."""

from __future__ import annotations

import re
from typing import Any

ANSWER = re.compile(r"#### (-?\d+)\s*$")


def compute_score(
    data_source: str | None,  # noqa: ARG001 - the signature that reward functions have
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
) -> dict[str, float]:
    """Whether the number is right, and its two parts `correct` and `form`, each 0 or 1."""
    found = ANSWER.search(solution_str)
    form = float(found is not None)
    correct = float(found is not None and found[1] == str(ground_truth))
    return {"score": correct, "correct": correct, "form": form}
