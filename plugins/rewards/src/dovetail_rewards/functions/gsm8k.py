"""The reward function `gsm8k`: compares the number after the last `####` with the ground truth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from dovetail.interfaces import GroundTruth, PluginConfig, RewardFunction
from dovetail_rewards.config import Gsm8kConfig

# A minus between two words or numbers is not a sign: the last number of `3-5` is 5, that of `= -5` is -5.
_SIGN = r"(?:(?<![\w)])[-+−]\$?|\$ ?[-+−]?)?"
_NUMBER = rf"{_SIGN}(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_LONGEST = 1000
"""Maximum length of a number, in characters; longer digit strings are not read as numbers."""
_STRICT = re.compile(rf"####\s*({_NUMBER})")
_FLEXIBLE = re.compile(rf"({_NUMBER})")


class Gsm8k(RewardFunction):
    """Rule of GSM8K (arXiv:2110.14168): reference solutions end with `#### 1,234`.

    `method: strict` takes the number after the last `####` that a number follows; `flexible` takes the last number of the response.
    Commas, dollar signs and a trailing full stop are ignored. Numbers are compared by value: 18, 18.0 and $18 are equal. The right number
    scores `score`, another number `format_score`, no number 0.
    """

    name = "gsm8k"
    api = ">=1.0,<2"
    aliases = ("openai/gsm8k",)
    capabilities = frozenset({"deterministic"})
    pure = True
    Config = Gsm8kConfig

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Return `score`, `correct` (1 or 0), and `pred`: the number found, as normalised text, or None."""
        answer = _answer(solution_str, strict=self.config.method == "strict")
        if answer is None:
            return {"score": 0.0, "correct": 0.0, "pred": None}
        right = answer == _number(ground_truth)
        return {
            "score": self.config.score if right else self.config.format_score,
            "correct": float(right),
            "pred": f"{answer.normalize():f}",
        }

    @classmethod
    def check_row(cls, config: PluginConfig, ground_truth: GroundTruth) -> str | None:
        if _number(ground_truth) is None:
            return f"ground truth {ground_truth!r} is not a number; expected a number such as '18' or '1,234'"
        return None


def _answer(text: str, *, strict: bool) -> Decimal | None:
    matches = (_STRICT if strict else _FLEXIBLE).findall(text)
    return _number(matches[-1]) if matches else None


def _number(value: object) -> Decimal | None:
    """Return a value as a number; None if it is not a finite number."""
    text = str(value).strip().removesuffix(".")
    for noise, plain in ((",", ""), ("$", ""), ("−", "-"), (" ", "")):
        text = text.replace(noise, plain)
    if len(text) > _LONGEST:
        return None
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
