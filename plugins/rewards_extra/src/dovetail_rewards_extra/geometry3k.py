r"""The reward function `geometry3k`: expects reasoning inside `<think>`, then the answer in a box."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.interfaces import GroundTruth
from dovetail_rewards import VerifiedFunction, last_boxed
from dovetail_rewards_extra.config import Geometry3kConfig


class Geometry3k(VerifiedFunction):
    r"""Scores format and answer on Geometry3K (arXiv:2105.04165): score = w·format + (1−w)·correct with w = `format_weight`.

    The format is right if the response begins with `<think>…</think>` and has a complete `\boxed{…}` afterwards. The answer is the last box
    anywhere in the response, compared with the ground truth as in `math`.
    """

    name = "geometry3k"
    api = ">=1.0,<2"
    aliases = ("hiyouga/geometry3k",)
    Config = Geometry3kConfig

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Return `score`, its parts `format` and `correct`, each 0 or 1, and `pred`: the answer as written, or None.

        Raises:
            TimeoutError, RewardError: see `VerifiedFunction.is_right`.
        """
        pred = last_boxed(solution_str)
        right = self.is_right(pred, ground_truth)
        in_form = self._in_form(solution_str)
        weight = self.config.format_weight
        score = weight * in_form + (1 - weight) * right
        return {"score": score, "format": float(in_form), "correct": float(right), "pred": pred}

    def _in_form(self, text: str) -> bool:
        if not self.config.require_think:
            return last_boxed(text) is not None
        text = text.strip()
        end = text.find("</think>")
        return text.startswith("<think>") and end >= 0 and last_boxed(text[end:]) is not None
