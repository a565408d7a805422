r"""The reward function `math`, for MATH and similar datasets: whether the boxed answer equals the ground truth mathematically."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.interfaces import GroundTruth
from dovetail_rewards.config import MathConfig
from dovetail_rewards.functions.answers import after_label, last_boxed
from dovetail_rewards.functions.verified import VerifiedFunction


class MathAnswer(VerifiedFunction):
    r"""Rule of MATH (arXiv:2103.03874): the answer is in the last `\boxed{…}`, or else after the last `Answer:`.

    The ground truth is the answer as LaTeX, plain text or a number, boxed or not, or a list of accepted answers. Two answers are equal if
    their texts are equal after notation is made uniform (`\dfrac12`, `$\frac{1}{2}$`), or if math-verify finds them equal (`0.5`,
    `2^{-1}`). `2\frac12` and `2 1/2` are the mixed number 2.5; `x = 5` is 5; `2x = 10` is not 10. The right answer scores `score`, another
    answer `format_score`, no answer `miss_score`.

    math-verify runs in separate processes. An answer whose comparison exceeds `verify_timeout` or the memory limit is wrong. If comparing
    the ground truth with the number 1 exceeds the time limit too, the sample fails as `timeout`.
    """

    name = "math"
    api = ">=1.0,<2"
    aliases = (
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "numina_aops_forum",
        "numina_synthetic_math",
        "numina_amc_aime",
        "numina_synthetic_amc",
        "numina_cn_k12",
        "numina_olympiads",
    )
    Config = MathConfig

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Return `score`, its parts `format` (an answer was found) and `correct`, each 0 or 1, and `pred`: the answer as written, or None.

        Raises:
            TimeoutError, RewardError: see `VerifiedFunction.is_right`.
        """
        pred = self._answer(solution_str)
        if pred is None:
            return {"score": self.config.miss_score, "format": 0.0, "correct": 0.0, "pred": None}
        right = self.is_right(pred, ground_truth)
        score = self.config.score if right else self.config.format_score
        return {"score": score, "format": 1.0, "correct": float(right), "pred": pred}

    def _answer(self, text: str) -> str | None:
        for place in self.config.extract:
            answer = last_boxed(text) if place == "boxed" else labelled_answer(text)
            if answer:
                return answer
        return None


def labelled_answer(text: str, *, stated: bool = False) -> str | None:
    """Return the text after the last `Answer:` or `answer is`, without its box and a final full stop; None without such a label.

    With `stated`, only `Answer:` counts as a label.
    """
    answer = after_label(text, stated=stated)
    if answer is None:
        return None
    return last_boxed(answer) or answer.removesuffix(".").strip() or None
