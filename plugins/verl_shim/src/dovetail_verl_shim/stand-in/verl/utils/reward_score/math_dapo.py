"""DAPO's reward function for mathematics: +1 for a right answer, else −1."""

from __future__ import annotations

import re
from typing import Any

from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.boxes import last_boxed_only_string, remove_boxed

__all__ = ["compute_score", "last_boxed_only_string", "normalize_final_answer", "remove_boxed"]
_END, _STRICT_END = 300, 100
"""Number of characters at the end of a response in which the answer is searched, without and with `strict_box_verify`."""


_REWRITTEN = (
    (r"\\(?:left|right|displaystyle|[!,;: ])|\^(?:\\circ|\{\\circ\})|[$%\"\s]|\\%", ""),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\(?:text(?:bf)?|mathrm|mbox|overline|boxed)\{(.*?)\}", r"\1"),
    (r"\\frac([^{])([^{])", r"\\frac{\1}{\2}"),
    (r"\\sqrt([^{\[])", r"\\sqrt{\1}"),
    (r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))", ""),
)
"""Pairs of a pattern and its replacement, which remove or unify notation that does not change an answer."""


def normalize_final_answer(final_answer: str) -> str:
    """Return an answer in a normal form, in which most equal answers have the same text; an equation becomes its right side."""
    text = final_answer.rpartition("=")[2]
    for pattern, instead in _REWRITTEN:
        text = re.sub(pattern, instead, text)
    return text.rstrip(".")


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, **_: Any
) -> dict[str, Any]:
    """Return `score` (1 or −1), `acc` (whether the answer is right) and `pred` (the answer found).

    Args:
        solution_str: the response.
        ground_truth: the right answer.
        strict_box_verify: whether to compare only the text in the last LaTeX command `boxed`, unnormalised.
    """
    if not strict_box_verify:
        found = default_compute_score("math_dapo", solution_str[-_END:], ground_truth)
        return {"score": found["score"], "acc": bool(found["correct"]), "pred": found["pred"]}
    box = last_boxed_only_string(solution_str[-_STRICT_END:])
    pred = None if box is None else remove_boxed(box)
    right = pred is not None and pred == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}
