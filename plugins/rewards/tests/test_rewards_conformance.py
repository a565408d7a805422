"""The conformance suite on every reward function."""

from __future__ import annotations

from dovetail_rewards.config import Gsm8kConfig, RegexFormatConfig
from dovetail_rewards.functions.exact_match import ExactMatch
from dovetail_rewards.functions.gsm8k import Gsm8k
from dovetail_rewards.functions.regex_format import RegexFormat
from dovetail_sdk.testing.conformance import RewardFunctionConformance


class TestGsm8k(RewardFunctionConformance):
    plugin = Gsm8k
    right = (("So it is\n#### 1,234", "1234"), ("#### $18.", "18"))
    wrong = (("#### 1235", "1234"), ("1234", "1234"), ("", "18"))


class TestGsm8kFlexible(RewardFunctionConformance):
    plugin = Gsm8k
    config = Gsm8kConfig(name="gsm8k", method="flexible")
    right = (("So it is 1,234", "1234"), ("18", "18"))
    wrong = (("1235", "1234"), ("no number", "18"))


class TestExactMatch(RewardFunctionConformance):
    plugin = ExactMatch
    right = ((" yes \n", "yes"),)
    wrong = (("no", "yes"), ("yes!", "yes"))


class TestRegexFormat(RewardFunctionConformance):
    plugin = RegexFormat
    config = RegexFormatConfig(name="regex_format", pattern=r"<answer>.*</answer>")
    right = (("<answer>4</answer>", None),)
    wrong = (("4", None),)
