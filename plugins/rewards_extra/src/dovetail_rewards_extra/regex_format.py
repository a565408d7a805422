"""The reward function `regex_format`: whether the response matches a regular expression."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dovetail.interfaces import GroundTruth, PluginConfig, PluginContext, RewardFunction
from dovetail_rewards_extra.config import RegexFormatConfig


class RegexFormat(RewardFunction):
    r"""Matches a response with a pattern, and compares the pattern's group `answer`, if any, with the ground truth.

    A response that matches scores `format_score`, plus `answer_score` if the group `answer` equals the ground truth; any other response
    scores `miss_score`. An example is `<think>.*</think>\s*<answer>(?P<answer>.*)</answer>`.

    In a config:

        reward: {function: {pattern: '<think>.*</think>\s*<answer>(?P<answer>.*)</answer>'}}
    """

    name = "regex_format"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    pure = True
    Config = RegexFormatConfig

    def __init__(self, config: RegexFormatConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._pattern = re.compile(config.pattern, re.DOTALL)

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Return `score` and the component `format`; with `answer_score`, also `correct`; with a group `answer`, also `pred`.

        `format` and `correct` are 0 or 1. `pred` is the text of the group `answer`, or None.
        """
        find = self._pattern.fullmatch if self.config.match == "full" else self._pattern.search
        match = find(solution_str.strip())
        score = self.config.format_score if match else self.config.miss_score
        parts: dict[str, Any] = {"format": float(match is not None)}
        answer = None
        if "answer" in self._pattern.groupindex:
            answer = match.group("answer") if match else None
            parts["pred"] = answer if answer is None else answer.strip()
        if self.config.answer_score:
            correct = answer is not None and answer.strip() == str(ground_truth).strip()
            parts["correct"] = float(correct)
            score += self.config.answer_score * correct
        return {"score": score, **parts}

    @classmethod
    def check_row(cls, config: PluginConfig, ground_truth: GroundTruth) -> str | None:
        if config.answer_score and not isinstance(ground_truth, (str, int, float)):
            return f"ground truth {ground_truth!r} can't be compared with an answer; expected a text or a number, or answer_score=0"
        return None
