"""The reward function `dapo_math`: +1 if the answer after `Answer:` near the end of the response is right, else −1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.interfaces import GroundTruth
from dovetail_rewards.config import DapoMathConfig
from dovetail_rewards.functions.answers import last_boxed
from dovetail_rewards.functions.math_answer import labelled_answer
from dovetail_rewards.functions.verified import VerifiedFunction


class DapoMath(VerifiedFunction):
    r"""Rule of DAPO-Math-17k and AIME (arXiv:2503.14476, eq. 7): 1 for an equivalent answer, else −1.

    The answer is the text after the last `Answer:` (or the last box) in the last `window` characters. It is compared with the ground truth,
    a text or a number, after notation is made uniform: `$34$`, `34.`, `\boxed{34}` and `m+n = 34` are 34; `2\frac12` and `2 1/2` are 2.5.
    Unlike verl's `math_dapo`, the rule does not accept every right side of `=`: `2x = 10` is not 10, and `x = 3` is not `y = 3`.
    """

    name = "dapo_math"
    api = ">=1.0,<2"
    aliases = (
        "math_dapo",
        "math_dapo_reasoning",
        "aime*",
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "BytedTsinghua-SIA/AIME-2024",
    )
    Config = DapoMathConfig

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Return `score`, the component `correct` (0 or 1), and `pred` (the answer as written, or None).

        Raises:
            TimeoutError, RewardError: see `VerifiedFunction.is_right`.
        """
        end = solution_str[-self.config.window :]
        boxed = self.config.extract == "boxed"
        pred = last_boxed(end) if boxed else labelled_answer(end, stated=True)
        right = self.is_right(pred, ground_truth)
        score = self.config.score if right else self.config.miss_score
        return {"score": score, "correct": float(right), "pred": pred}
