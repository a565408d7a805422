"""The conformance suite on every reward function, and the data sources that are scored without configuration."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.config import load_config
from dovetail.errors import ConfigError, DataError
from dovetail.interfaces import PluginContext, Prompt
from dovetail.sections import RewardSection
from dovetail_rewards.config import DapoMathConfig
from dovetail_rewards.conformance.functions import *  # noqa: F403 - every suite
from dovetail_rollouts import check_sources, configured_functions

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
    functions = configured_functions(RewardSection(), PluginContext())
    check_sources(functions, rows(source, truth))
    assert functions.function_for(source).name == name
    with pytest.raises(DataError, match=f"{name} .*ground truth"):
        check_sources(functions, rows(source, None))


@pytest.mark.parametrize(
    ("source", "near"),
    [("AIME2024", "aime"), ("my/aime", ""), ("lighteval/MATH2", "lighteval/MATH"), ("openai/gsm8", "openai/gsm8k")],
)  # fmt: skip
def test_an_unmapped_source_is_an_error_before_training(source, near) -> None:
    functions = configured_functions(RewardSection(), PluginContext())
    with pytest.raises(ConfigError, match=source) as error:
        check_sources(functions, rows(source, "34"))
    assert f"{near}" in str(error.value)


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
