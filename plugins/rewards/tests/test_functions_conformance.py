"""The conformance suite on the functions by data source, and the sources that they score without configuration."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.config.load import load_config
from dovetail.config.sections import RewardSection
from dovetail.errors import ConfigError, DataError
from dovetail.flow.reward_functions import build_functions, check_sources
from dovetail.interfaces.data import Prompt
from dovetail.interfaces.plugin import PluginContext
from dovetail_rewards.config_functions import (
    DapoMathConfig,
    FuzzyMatchConfig,
    Geometry3kConfig,
    JsonSchemaConfig,
    LengthPenaltyConfig,
    MathConfig,
    RepetitionPenaltyConfig,
)
from dovetail_rewards.functions.dapo_math import DapoMath
from dovetail_rewards.functions.fuzzy_match import FuzzyMatch
from dovetail_rewards.functions.geometry3k import Geometry3k
from dovetail_rewards.functions.instruction_following import InstructionFollowing
from dovetail_rewards.functions.json_schema import JsonSchema
from dovetail_rewards.functions.math_answer import MathAnswer
from dovetail_rewards.functions.multiple_choice import MultipleChoice
from dovetail_rewards.functions.shaping import LengthPenalty, RepetitionPenalty
from dovetail_sdk.testing.conformance import RewardFunctionConformance


class TestMath(RewardFunctionConformance):
    plugin = MathAnswer
    config = MathConfig(name="math", processes=1)
    right = ((r"so \boxed{0.5}", r"\frac{1}{2}"), ("Answer: $1+x$", "x+1"))
    wrong = ((r"so \boxed{0.6}", r"\frac{1}{2}"), ("1/2", "1/2"), ("", "1/2"))


class TestMathText(RewardFunctionConformance):
    plugin = MathAnswer
    config = MathConfig(name="math", verify="text")
    right = ((r"\boxed{\dfrac12}", r"\frac{1}{2}"),)
    wrong = ((r"\boxed{2^{-1}}", r"\frac{1}{2}"),)


class TestDapoMath(RewardFunctionConformance):
    plugin = DapoMath
    right = (("…\nAnswer: $34$", "34"), ("Answer: \\boxed{34}.", 34))
    wrong = (("Answer: 35", "34"), ("34", "34"), ("", "34"))


class TestDapoMathSymbolic(RewardFunctionConformance):
    plugin = DapoMath
    config = DapoMathConfig(name="dapo_math", verify="symbolic", extract="boxed", processes=1)
    right = ((r"\boxed{2^{-1}}", "0.5"),)
    wrong = ((r"\boxed{2}", "0.5"), ("Answer: 0.5", "0.5"))


class TestGeometry3k(RewardFunctionConformance):
    plugin = Geometry3k
    config = Geometry3kConfig(name="geometry3k", processes=1)
    right = (("<think>a</think>\\boxed{2\\sqrt{2}}", "\\sqrt{8}"),)
    wrong = (("\\boxed{\\sqrt{8}}", "\\sqrt{8}"), ("<think>a</think>\\boxed{1}", "\\sqrt{8}"))


class TestMultipleChoice(RewardFunctionConformance):
    plugin = MultipleChoice
    right = (("The answer is (B).", "B"), ("\\boxed{C}", "C"))
    wrong = (("The answer is (A).", "B"), ("B or not B", "B"), ("", "B"))


class TestFuzzyMatch(RewardFunctionConformance):
    plugin = FuzzyMatch
    right = (("The red cat!", "a red cat"),)
    wrong = (("a red dog", "a red cat"), ("", "cat"))


class TestFuzzyMatchEdit(RewardFunctionConformance):
    plugin = FuzzyMatch
    config = FuzzyMatchConfig(name="fuzzy_match", metric="edit", threshold=0.8)
    right = (("colour", "color"),)
    wrong = (("col", "color"),)


class TestJsonSchema(RewardFunctionConformance):
    plugin = JsonSchema
    right = (("[1, 2]", {"type": "array"}),)
    wrong = (("{}", {"type": "array"}), ("[", {"type": "array"}))


class TestJsonValue(RewardFunctionConformance):
    plugin = JsonSchema
    config = JsonSchemaConfig(name="json_schema", compare=True, valid_score=0.0, fields_score=1.0)
    right = (('{"a": 1}', {"a": 1}),)
    wrong = (('{"a": 2}', {"a": 1}),)


class TestLengthPenalty(RewardFunctionConformance):
    plugin = LengthPenalty
    config = LengthPenaltyConfig(name="length_penalty", limit=4, buffer=2)
    right = (("a b", None),)
    wrong = (("a b c", None), ("a b c d", None))


class TestRepetitionPenalty(RewardFunctionConformance):
    plugin = RepetitionPenalty
    config = RepetitionPenaltyConfig(name="repetition_penalty", n=2)
    right = (("a b c d", None),)
    wrong = (("a b a b", None),)


class TestInstructionFollowing(RewardFunctionConformance):
    plugin = InstructionFollowing
    right = (("small letters", [{"instruction": "change_case:english_lowercase"}]),)
    wrong = (("Small letters", [{"instruction": "change_case:english_lowercase"}]),)


SOURCES = {
    "openai/gsm8k": ("gsm8k", "18"),
    "math": ("math", "x+1"),
    "lighteval/MATH": ("math", "x+1"),
    "DigitalLearningGmbH/MATH-lighteval": ("math", "x+1"),
    "HuggingFaceH4/MATH-500": ("math", "x+1"),
    "numina_olympiads": ("math", "x+1"),
    "math_dapo": ("dapo_math", "34"),
    "math_dapo_reasoning": ("dapo_math", "34"),
    "aime": ("dapo_math", "34"),
    "aime2024": ("dapo_math", "34"),
    "aime_2025_i": ("dapo_math", "34"),
    "hiyouga/geometry3k": ("geometry3k", "34"),
    "google/IFEval": ("instruction_following", [{"instruction": "punctuation:no_comma"}]),
}
"""data_source → the function that scores it by default, and a ground truth."""


def rows(source: str, truth: object) -> list[Prompt]:
    return [
        Prompt(index=0, prompt_ids=np.arange(2), raw="", data_source=source, ground_truth=truth)
    ]


@pytest.mark.parametrize("source", SOURCES)
def test_known_sources_need_no_configuration(source) -> None:
    name, truth = SOURCES[source]
    functions = build_functions(RewardSection(), PluginContext())
    check_sources(functions, rows(source, truth))
    assert functions.function_for(source).name == name
    with pytest.raises(DataError, match=f"{name} can't score it: ground truth"):
        check_sources(functions, rows(source, None))


@pytest.mark.parametrize("source", ["AIME2024", "my/aime", "lighteval/MATH2"])
def test_an_unmapped_source_is_an_error_before_training(source) -> None:
    functions = build_functions(RewardSection(), PluginContext())
    with pytest.raises(ConfigError, match="has no reward function"):
        check_sources(functions, rows(source, "34"))


def test_a_config_maps_further_sources_with_typed_options(tmp_path) -> None:
    text = """
model: {path: m}
data: {train_files: [d.jsonl]}
reward:
  functions:
    my/contest: {name: dapo_math, extract: boxed, window: 100}
    my/form: {name: json_schema, schema: {type: object, required: [a]}, fields_score: 0.5}
    my/letters: {name: multiple_choice, extract: [tag, last]}
"""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    functions = load_config(path).config.reward.functions
    assert functions["my/contest"] == DapoMathConfig(name="dapo_math", extract="boxed", window=100)
    assert functions["my/form"].schema == {"type": "object", "required": ["a"]}
    assert functions["my/letters"].extract == ("tag", "last")
