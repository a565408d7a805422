"""Conformance suites of the reward functions, with right and wrong answers."""

from __future__ import annotations

import pytest

from dovetail_rewards.config import DapoMathConfig, Gsm8kConfig, MathConfig
from dovetail_rewards.functions.code import Code
from dovetail_rewards.functions.dapo_math import DapoMath
from dovetail_rewards.functions.exact_match import ExactMatch
from dovetail_rewards.functions.gsm8k import Gsm8k
from dovetail_rewards.functions.math_answer import MathAnswer
from dovetail_rewards.sandbox import available_levels
from dovetail_sdk.testing.conformance import RewardFunctionConformance

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
"""Test cases for a program that adds two numbers."""
ADDS = "```python\nprint(sum(map(int, input().split())))\n```"


class TestCode(RewardFunctionConformance):
    """Conformance suite of the reward function `code`, on machines where a sandbox works."""

    plugin = Code
    right = ((ADDS, SUMS),)
    wrong = (("```python\nprint(3)\n```", SUMS), ("no program", SUMS))

    def needs_examples(self) -> None:
        """Skip the tests if no sandbox can run a program."""
        if not any(level.available for level in available_levels()[:2]):
            pytest.skip("no sandbox can run a program here: see dovetail doctor")


class TestGsm8k(RewardFunctionConformance):
    """Conformance suite of the reward function `gsm8k`."""

    plugin = Gsm8k
    right = (("So it is\n#### 1,234", "1234"), ("#### $18.", "18"))
    wrong = (("#### 1235", "1234"), ("1234", "1234"), ("", "18"))


class TestGsm8kFlexible(RewardFunctionConformance):
    """Conformance suite of the reward function `gsm8k` with `method: flexible`."""

    plugin = Gsm8k
    config = Gsm8kConfig(name="gsm8k", method="flexible")
    right = (("So it is 1,234", "1234"), ("18", "18"))
    wrong = (("1235", "1234"), ("no number", "18"))


class TestExactMatch(RewardFunctionConformance):
    """Conformance suite of the reward function `exact_match`."""

    plugin = ExactMatch
    right = ((" yes \n", "yes"),)
    wrong = (("no", "yes"), ("yes!", "yes"))


class TestMath(RewardFunctionConformance):
    """Conformance suite of the reward function `math`, which compares symbolically."""

    plugin = MathAnswer
    config = MathConfig(name="math", processes=1)
    right = ((r"so \boxed{0.5}", r"\frac{1}{2}"), ("Answer: $1+x$", "x+1"))
    wrong = ((r"so \boxed{0.6}", r"\frac{1}{2}"), ("1/2", "1/2"), ("", "1/2"))


class TestMathText(RewardFunctionConformance):
    """Conformance suite of the reward function `math` with `verify: text`."""

    plugin = MathAnswer
    config = MathConfig(name="math", verify="text")
    right = ((r"\boxed{\dfrac12}", r"\frac{1}{2}"),)
    wrong = ((r"\boxed{2^{-1}}", r"\frac{1}{2}"),)


class TestDapoMath(RewardFunctionConformance):
    """Conformance suite of the reward function `dapo_math`."""

    plugin = DapoMath
    right = (("…\nAnswer: $34$", "34"), ("Answer: \\boxed{34}.", 34))
    wrong = (("Answer: 35", "34"), ("34", "34"), ("", "34"))


class TestDapoMathSymbolic(RewardFunctionConformance):
    """Conformance suite of the reward function `dapo_math` with `verify: symbolic` and `extract: boxed`."""

    plugin = DapoMath
    config = DapoMathConfig(name="dapo_math", verify="symbolic", extract="boxed", processes=1)
    right = ((r"\boxed{2^{-1}}", "0.5"),)
    wrong = ((r"\boxed{2}", "0.5"), ("Answer: 0.5", "0.5"))
