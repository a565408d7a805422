"""Conformance suites of the reward functions, with right and wrong answers."""

from __future__ import annotations

from dovetail_rewards_extra.config import (
    FuzzyMatchConfig,
    Geometry3kConfig,
    JsonSchemaConfig,
    LengthPenaltyConfig,
    RegexFormatConfig,
    RepetitionPenaltyConfig,
)
from dovetail_rewards_extra.fuzzy_match import FuzzyMatch
from dovetail_rewards_extra.geometry3k import Geometry3k
from dovetail_rewards_extra.instruction_following import InstructionFollowing
from dovetail_rewards_extra.json_schema import JsonSchema
from dovetail_rewards_extra.multiple_choice import MultipleChoice
from dovetail_rewards_extra.regex_format import RegexFormat
from dovetail_rewards_extra.shaping import LengthPenalty, RepetitionPenalty
from dovetail_sdk.testing.conformance import RewardFunctionConformance


class TestRegexFormat(RewardFunctionConformance):
    """Conformance suite of the reward function `regex_format`."""

    plugin = RegexFormat
    config = RegexFormatConfig(name="regex_format", pattern=r"<answer>.*</answer>")
    right = (("<answer>4</answer>", None),)
    wrong = (("4", None),)


class TestGeometry3k(RewardFunctionConformance):
    """Conformance suite of the reward function `geometry3k`."""

    plugin = Geometry3k
    config = Geometry3kConfig(name="geometry3k", processes=1)
    right = (("<think>a</think>\\boxed{2\\sqrt{2}}", "\\sqrt{8}"),)
    wrong = (("\\boxed{\\sqrt{8}}", "\\sqrt{8}"), ("<think>a</think>\\boxed{1}", "\\sqrt{8}"))


class TestMultipleChoice(RewardFunctionConformance):
    """Conformance suite of the reward function `multiple_choice`."""

    plugin = MultipleChoice
    right = (("The answer is (B).", "B"), ("\\boxed{C}", "C"))
    wrong = (("The answer is (A).", "B"), ("B or not B", "B"), ("", "B"))


class TestFuzzyMatch(RewardFunctionConformance):
    """Conformance suite of the reward function `fuzzy_match`."""

    plugin = FuzzyMatch
    right = (("The red cat!", "a red cat"),)
    wrong = (("a red dog", "a red cat"), ("", "cat"))


class TestFuzzyMatchEdit(RewardFunctionConformance):
    """Conformance suite of the reward function `fuzzy_match` with `metric: edit`."""

    plugin = FuzzyMatch
    config = FuzzyMatchConfig(name="fuzzy_match", metric="edit", threshold=0.8)
    right = (("colour", "color"),)
    wrong = (("col", "color"),)


class TestJsonSchema(RewardFunctionConformance):
    """Conformance suite of the reward function `json_schema` with a schema."""

    plugin = JsonSchema
    right = (("[1, 2]", {"type": "array"}),)
    wrong = (("{}", {"type": "array"}), ("[", {"type": "array"}))


class TestJsonValue(RewardFunctionConformance):
    """Conformance suite of the reward function `json_schema` with `compare: true`."""

    plugin = JsonSchema
    config = JsonSchemaConfig(name="json_schema", compare=True, valid_score=0.0, fields_score=1.0)
    right = (('{"a": 1}', {"a": 1}),)
    wrong = (('{"a": 2}', {"a": 1}),)


class TestLengthPenalty(RewardFunctionConformance):
    """Conformance suite of the reward function `length_penalty`."""

    plugin = LengthPenalty
    config = LengthPenaltyConfig(name="length_penalty", limit=4, buffer=2)
    right = (("a b", None),)
    wrong = (("a b c", None), ("a b c d", None))


class TestRepetitionPenalty(RewardFunctionConformance):
    """Conformance suite of the reward function `repetition_penalty`."""

    plugin = RepetitionPenalty
    config = RepetitionPenaltyConfig(name="repetition_penalty", n=2)
    right = (("a b c d", None),)
    wrong = (("a b a b", None),)


class TestInstructionFollowing(RewardFunctionConformance):
    """Conformance suite of the reward function `instruction_following`."""

    plugin = InstructionFollowing
    right = (("small letters", [{"instruction": "change_case:english_lowercase"}]),)
    wrong = (("Small letters", [{"instruction": "change_case:english_lowercase"}]),)
