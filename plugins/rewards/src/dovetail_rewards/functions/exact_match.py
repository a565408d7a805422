"""The reward function `exact_match`: whether the response, or the part that a pattern matches, equals the ground truth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dovetail.interfaces import GroundTruth, PluginConfig, PluginContext, RewardFunction
from dovetail_rewards.config import ExactMatchConfig
from dovetail_rewards.functions.answers import extracted, truth_texts


class ExactMatch(RewardFunction):
    """Compares the response's text with the ground truth, after applying the options `strip`, `ignore_case` and `extract`.

    The ground truth is a text, a number or a list of them; with a list, any entry may match. With `extract`, the last match of the pattern
    is compared (its first group, if the pattern has one); a response without a match is a miss.
    """

    name = "exact_match"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    pure = True
    Config = ExactMatchConfig

    def __init__(self, config: ExactMatchConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._extract = re.compile(config.extract, re.DOTALL) if config.extract else None

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Return `score` and `pred`: the compared text, after applying all options, or None."""
        answer = extracted(self._extract, solution_str)
        pred = None if answer is None else self._normal(answer)
        hit = pred in {self._normal(text) for text in truth_texts(ground_truth)}
        return {"score": self.config.score if hit else self.config.miss_score, "pred": pred}

    @classmethod
    def check_row(cls, config: PluginConfig, ground_truth: GroundTruth) -> str | None:
        if not truth_texts(ground_truth):
            return f"ground truth {ground_truth!r} holds no answer; expected a text, a number or a list of them"
        return None

    def _normal(self, text: str) -> str:
        text = text.strip() if self.config.strip else text
        return text.casefold() if self.config.ignore_case else text
