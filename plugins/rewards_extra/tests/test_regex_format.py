"""`regex_format`: scores of the format and of the answer in it."""

from __future__ import annotations

import pytest

from dovetail.interfaces import PluginContext
from dovetail_rewards_extra.config import RegexFormatConfig
from dovetail_rewards_extra.regex_format import RegexFormat

THINK = r"<think>.*</think>\s*<answer>(?P<answer>.*)</answer>"


@pytest.mark.parametrize(
    ("text", "config", "expected"),
    [
        ("<think>a\nb</think>\n<answer> 4 </answer>", {}, {"score": 1.0, "format": 1.0}),
        (" <think></think><answer>4</answer> ", {}, {"score": 1.0, "format": 1.0}),
        ("so <think></think><answer>4</answer>", {}, {"score": 0.0, "format": 0.0}),
        (
            "so <think></think><answer>4</answer>",
            {"match": "search"},
            {"score": 1.0, "format": 1.0},
        ),
        ("4", {"miss_score": -0.5}, {"score": -0.5, "format": 0.0}),
        (
            "<think></think><answer> 4 </answer>",
            {"format_score": 0.2, "answer_score": 0.8},
            {"score": 1.0, "format": 1.0, "correct": 1.0},
        ),
        (
            "<think></think><answer>5</answer>",
            {"format_score": 0.2, "answer_score": 0.8},
            {"score": 0.2, "format": 1.0, "correct": 0.0},
        ),
        (
            "4",
            {"format_score": 0.2, "answer_score": 0.8},
            {"score": 0.0, "format": 0.0, "correct": 0.0},
        ),
    ],
)
def test_regex_format(text, config, expected) -> None:
    function = RegexFormat(RegexFormatConfig(pattern=THINK, **config), PluginContext())
    parts = dict(function.compute_score(None, text, "4"))
    del parts["pred"]
    assert parts == pytest.approx(expected)


def test_a_pattern_that_is_no_regular_expression_is_a_config_error() -> None:
    with pytest.raises(ValueError, match=r"pattern='\('"):
        RegexFormatConfig(pattern="(")


def test_an_answer_score_needs_a_marked_answer() -> None:
    with pytest.raises(ValueError, match=r"no group \(\?P<answer>"):
        RegexFormatConfig(pattern="a", answer_score=1.0)


def test_a_regex_format_needs_a_ground_truth_only_where_answers_count() -> None:
    assert RegexFormat.check_row(RegexFormatConfig(pattern=THINK), None) is None
    weighted = RegexFormatConfig(pattern=THINK, answer_score=1.0)
    assert "None" in (RegexFormat.check_row(weighted, None) or "")
    assert RegexFormat.check_row(weighted, "4") is None


def test_the_answer_is_what_the_pattern_marks() -> None:
    def pred(function: RegexFormat, text: str) -> object:
        return function.compute_score(None, text, "4")["pred"]

    form = RegexFormat(RegexFormatConfig(pattern=THINK), PluginContext())
    assert pred(form, "<think></think><answer> 4 </answer>") == "4"
    assert pred(form, "4") is None
    unmarked = RegexFormat(RegexFormatConfig(pattern=r"\d+"), PluginContext())
    assert "pred" not in unmarked.compute_score(None, "4", "4")
