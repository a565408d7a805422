"""The suite of reward functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from dovetail.interfaces import RewardFunction
from dovetail_sdk.testing.conformance.plugin import PluginConformance

_ODD_TEXTS = (
    "",
    " ",
    "\n\n",
    "####",
    "\x00",
    "∑ 字 🦊",
    "9" * 5000,
    "(((((",
    "\\boxed{",
    "nan",
    "inf",
)


class RewardFunctionConformance(PluginConformance):
    """Conformance suite for reward functions: subclass it and set `plugin`, `right` and `wrong`."""

    kind = "reward_function"
    plugin: ClassVar[type[RewardFunction]]
    right: ClassVar[tuple[tuple[str, Any], ...]] = ()
    """Pairs of response and ground truth that deserve the full score; if empty, tests that need examples are skipped."""
    wrong: ClassVar[tuple[tuple[str, Any], ...]] = ()
    """Pairs of response and ground truth that deserve less than the full score."""

    def needs_examples(self) -> None:
        """Skip the test if the suite has no example of a right answer or of a wrong answer."""
        if not (self.right and self.wrong):
            pytest.skip(
                "the suite has no examples: set `right` and `wrong` in a suite, in the package's conformance.py"
            )

    def score(self, solution: str, truth: Any) -> float:
        """Return the score of one response."""
        result = self.make().compute_score(None, solution, truth, None)
        return float(result["score"] if isinstance(result, Mapping) else result)

    def test_right_answers_score_above_wrong_ones(self) -> None:
        self.needs_examples()
        lowest = min(self.score(*pair) for pair in self.right)
        highest = max(self.score(*pair) for pair in self.wrong)
        assert lowest > highest

    def test_odd_texts_get_a_finite_score_and_no_exception(self) -> None:
        self.needs_examples()
        for _, truth in self.right:
            for text in _ODD_TEXTS:
                assert math.isfinite(self.score(text, truth)), text

    def test_the_same_input_gets_the_same_score(self) -> None:
        self.needs_examples()
        for pair in (*self.right, *self.wrong):
            assert self.score(*pair) == self.score(*pair)

    def test_ground_truths_of_the_examples_are_accepted(self) -> None:
        self.needs_examples()
        for _, truth in self.right:
            assert self.plugin.check_row(self.make_config(), truth) is None
