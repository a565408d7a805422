"""The scores of each rule-based reward function for given responses."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.interfaces import PluginContext
from dovetail_rewards.config import ExactMatchConfig, Gsm8kConfig
from dovetail_rewards.functions.exact_match import ExactMatch
from dovetail_rewards.functions.gsm8k import Gsm8k


def gsm8k(text: str, truth: Any, **config: Any) -> float:
    function = Gsm8k(Gsm8kConfig(**config), PluginContext())
    return function.compute_score("openai/gsm8k", text, truth)["score"]


def exact_match(text: str, truth: Any, **config: Any) -> float:
    function = ExactMatch(ExactMatchConfig(**config), PluginContext())
    return function.compute_score(None, text, truth)["score"]


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("6 × 3 = 18\n#### 18", "18", 1.0),
        ("####18", "18", 1.0),
        ("#### 18.", "18", 1.0),
        ("#### 18.0", "18", 1.0),
        ("#### 18 apples", "18", 1.0),
        ("#### $1,234.50", "1234.5", 1.0),
        ("#### 1,234", "1,234", 1.0),
        ("#### $ 70,000.", 70000, 1.0),
        ("#### -5", "-5", 1.0),
        ("#### −5", "-5", 1.0),
        ("#### $-5", "-5", 1.0),
        ("#### -$5", "-5", 1.0),
        ("#### .5", "0.5", 1.0),
        ("#### 3\nno, wait\n#### 4", "4", 1.0),
        ("#### 3\nno, wait\n#### 4", "3", 0.0),
        ("#### 3\n#### ?", "3", 1.0),
        ("#### 19", "18", 0.0),
        ("18", "18", 0.0),
        ("#### eighteen", "18", 0.0),
        ("####", "18", 0.0),
        ("", "18", 0.0),
    ],
)
def test_gsm8k_strict_takes_the_number_after_the_last_hashes(text, truth, score) -> None:
    assert gsm8k(text, truth) == score


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("so the answer is 18", "18", 1.0),
        ("18 it is, not 19", "18", 0.0),
        ("2 + 16 = 18.", "18", 1.0),
        ("10-7", "7", 1.0),
        ("it fell to -7", "-7", 1.0),
        ("- 5 apples", "5", 1.0),
        ("it costs $1,000.", "1000", 1.0),
        ("1, 2, 3", "3", 1.0),
        ("no number", "18", 0.0),
    ],
)
def test_gsm8k_flexible_takes_the_last_number(text, truth, score) -> None:
    assert gsm8k(text, truth, method="flexible") == score


def test_gsm8k_gives_the_format_score_for_a_wrong_number_in_the_right_place() -> None:
    weights = {"score": 2.0, "format_score": 0.1}
    assert gsm8k("#### 18", "18", **weights) == 2.0
    assert gsm8k("#### 17", "18", **weights) == 0.1
    assert gsm8k("17", "18", **weights) == 0.0


@pytest.mark.parametrize("truth", ["eighteen", "", None, "nan", "inf", "18 apples", [18]])
def test_gsm8k_refuses_a_ground_truth_that_is_no_number(truth) -> None:
    assert repr(truth) in (Gsm8k.check_row(Gsm8kConfig(), truth) or "")


@pytest.mark.parametrize("truth", ["18", "1,234", "-5", "$18", 18, 0.5])
def test_gsm8k_accepts_numbers_as_ground_truth(truth) -> None:
    assert Gsm8k.check_row(Gsm8kConfig(), truth) is None


@pytest.mark.parametrize(
    ("text", "truth", "config", "score"),
    [
        ("Paris", "Paris", {}, 1.0),
        (" Paris\n", "Paris", {}, 1.0),
        (" Paris", "Paris", {"strip": False}, 0.0),
        ("paris", "Paris", {}, 0.0),
        ("PARIS", "paris", {"ignore_case": True}, 1.0),
        ("Straße", "STRASSE", {"ignore_case": True}, 1.0),
        ("4", 4, {}, 1.0),
        ("b", ["a", "b"], {}, 1.0),
        ("c", ["a", "b"], {}, 0.0),
        ("Answer: 3. Answer: 4", "4", {"extract": r"Answer: (\d+)"}, 1.0),
        ("Answer: 4. Answer: 3", "4", {"extract": r"Answer: (\d+)"}, 0.0),
        ("I say 4", "4", {"extract": r"\d"}, 1.0),
        ("I say", "4", {"extract": r"\d"}, 0.0),
        ("<a>x\ny</a>", "x\ny", {"extract": "<a>(.*)</a>"}, 1.0),
        ("", "", {"extract": "(a)|b"}, 0.0),
        ("b", "b", {"extract": "(a)|b"}, 0.0),
        ("Paris", "Paris", {"score": 2.0, "miss_score": -1.0}, 2.0),
        ("Rome", "Paris", {"score": 2.0, "miss_score": -1.0}, -1.0),
    ],
)
def test_exact_match(text, truth, config, score) -> None:
    assert exact_match(text, truth, **config) == score


@pytest.mark.parametrize("truth", [None, {}, [], [None], ["a", {}]])
def test_exact_match_refuses_a_ground_truth_that_is_no_text(truth) -> None:
    assert repr(truth) in (ExactMatch.check_row(ExactMatchConfig(), truth) or "")


def test_a_pattern_that_is_no_regular_expression_is_a_config_error() -> None:
    with pytest.raises(ValueError, match=r"extract='\['"):
        ExactMatchConfig(extract="[")


def test_every_rule_names_the_answer_that_it_judged_as_it_judged_it() -> None:
    def pred(function: Any, text: str) -> Any:
        return function.compute_score(None, text, "4")["pred"]

    number = Gsm8k(Gsm8kConfig(), PluginContext())
    assert [pred(number, f"#### {text}") for text in ("4", "4.00", "$4", "1,200.50", "no")] == [
        "4", "4", "4", "1200.5", None
    ]  # fmt: skip
    config = ExactMatchConfig(extract=r"is (.*)", ignore_case=True)
    text = ExactMatch(config, PluginContext())
    assert [pred(text, said) for said in ("it is Paris ", "is PARIS", "Paris")] == [
        "paris", "paris", None
    ]  # fmt: skip
