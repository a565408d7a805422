"""Every rule gives a finite score on any text, without exceptions, in time linear in the text's length."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dovetail.interfaces import PluginContext
from dovetail.plugins import make_plugin, plugin_section, ref_for
from dovetail_rewards.functions.answers import after_label, last_boxed, last_tag
from dovetail_rewards.functions.latex_text import as_number, normal_answer, same_text
from dovetail_rewards_extra.config import InstructionFollowingConfig
from dovetail_rewards_extra.instruction_following import InstructionFollowing
from dovetail_rewards_extra.instructions import INSTRUCTIONS

LENGTH = 25_000
SECONDS = 0.5
"""Time limit in seconds, far above linear work on such a text and far below quadratic work."""

ARGUMENTS = {
    "keywords": ["a"], "forbidden_words": ["\\boxed"], "keyword": "answer", "frequency": 1, "letter": "a",
    "let_frequency": 1, "num_words": 1, "num_sentences": 1, "num_paragraphs": 1, "nth_paragraph": 1, "first_word": "a",
    "num_placeholders": 1, "postscript_marker": "P.S.", "num_bullets": 1, "num_highlights": 1, "section_spliter": "SECTION",
    "num_sections": 1, "prompt_to_repeat": "a", "end_phrase": "a", "capital_frequency": 1,
}  # fmt: skip
ALL = {
    "instruction_id_list": list(INSTRUCTIONS),
    "kwargs": [
        {key: ARGUMENTS[key] for key in one.arguments if key in ARGUMENTS}
        for one in INSTRUCTIONS.values()
    ],
}
TREE = {"$defs": {"t": {"items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t", "required": ["a"]}

FUNCTIONS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "gsm8k": ("gsm8k", {}, "18"),
    "gsm8k_flexible": ("gsm8k", {"method": "flexible"}, "18"),
    "exact_match": ("exact_match", {"ignore_case": True, "extract": r"a(\d)"}, "18"),
    "math": ("math", {"processes": 1}, "x+1"),
    "dapo_math": ("dapo_math", {"window": LENGTH}, "34"),
    "dapo_math_boxed": ("dapo_math", {"window": LENGTH, "extract": "boxed"}, "34"),
    "geometry3k": ("geometry3k", {"verify": "text"}, "34"),
    "multiple_choice": ("multiple_choice", {"extract": ("boxed", "tag", "statement", "line", "last")}, "B"),
    "token_f1": ("fuzzy_match", {}, "a cat"),
    "edit": ("fuzzy_match", {"metric": "edit"}, "a cat"),
    "json_schema": ("json_schema", {"schema": TREE}, None),
    "json_value": ("json_schema", {"compare": True}, {"a": [1]}),
    "length_penalty": ("length_penalty", {"limit": 9}, None),
    "repetition_penalty": ("repetition_penalty", {"n": 20}, None),
    "repetition_characters": ("repetition_penalty", {"unit": "characters"}, None),
    "instructions": ("instruction_following", {}, ALL),
}  # fmt: skip

PIECES = [
    "{", "}", "[", "(", "\\", "\\boxed{", "\\boxed ", "\\fbox", "\\frac{", "\\text{", "\\left(", "Answer:", "answer is ",
    "**", "*", "* ", "\n* ", "- ", "\n- ", "#", "#### ", "1", "1,", "1.", "$", "-", "<answer>", "</answer>", "<think>",
    "</think>", "`", "```\n", '"', '{"a":', "[1,", ".", "? ", "A", "(B)", "Answer: (", "a ", "\n", "\n\n", " ", "\t",
    "***\n", "P.S.", "P. S. ", "SECTION ", "<<", "<<a", "[a", "My answer is ", "\x00", "字", "。", "answer\n", "Dr. ", "_",
]  # fmt: skip


ENDS = [
    ("", ""),
    ("x", "x"),
    ("```\n", "x```"),
    ("Answer: (", "\\boxed{1}"),
    ("\\boxed{", "\nAnswer: 1"),
]
"""Texts before and after the repetitions of a piece, so that a search fails only at the end of the text."""


def make(name: str) -> tuple[Any, Any]:
    plugin, settings, truth = FUNCTIONS[name]
    section = plugin_section("reward_function", plugin, **settings)
    return make_plugin(ref_for("reward_function", section), PluginContext()), truth


def test_the_instructions_here_are_all_and_right() -> None:
    assert InstructionFollowing.check_row(InstructionFollowingConfig(), ALL) is None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_long_hostile_texts_take_linear_time(name) -> None:
    function, truth = make(name)
    runs = [piece * (LENGTH // len(piece)) for piece in PIECES]
    texts = [f"{begin}{run}{end}" for run in runs for begin, end in ENDS]
    # The first call starts processes and builds tables, so its time does not count.
    function.compute_score(None, "\\boxed{x}", truth)
    for text in texts:
        began = time.process_time()  # CPU time, independent of the machine's load
        value = function.compute_score(None, text, truth)
        took = time.process_time() - began
        assert math.isfinite(value["score"])
        assert took < SECONDS, (text[:20], took)


fragments = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=30).map("".join)


@given(text=fragments)
@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"math"}))
def test_any_text_gets_a_finite_score(name, text) -> None:
    function, truth = make(name)
    value = function.compute_score(None, text, truth)
    assert math.isfinite(value["score"])
    assert all(
        math.isfinite(part) for key, part in value.items() if isinstance(part, float) and key
    )


@given(text=fragments)
def test_any_answer_gets_a_finite_score_of_math(text) -> None:
    function, truth = make("math")
    value = function.compute_score(None, f"\\boxed{{{text}}}", truth)
    assert math.isfinite(value["score"])


@given(text=fragments)
def test_what_is_extracted_stands_in_the_text(text) -> None:
    for found in (last_boxed(text), after_label(text), last_tag(text, "answer")):
        assert found is None or found in text


balanced = st.recursive(
    st.text("ab1 ,", max_size=4),
    lambda inner: st.lists(inner.map(lambda part: f"{{{part}}}") | inner, max_size=3).map("".join),
    max_leaves=8,
)


@given(before=fragments, content=balanced)
def test_a_balanced_box_at_the_end_is_found_whatever_stands_before(before, content) -> None:
    text = f"{before} \n\\boxed{{{content}}}"
    assert last_boxed(text) == content.strip()


@given(text=fragments)
def test_the_normal_form_is_its_own_and_every_answer_equals_itself(text) -> None:
    normal = normal_answer(text)
    assert same_text(text, text) is bool(normal)
    assert not re.search(r"\s", normal)


@given(number=st.fractions(max_denominator=10**6))
def test_numbers_are_exact(number) -> None:
    assert as_number(str(number)) == number
    assert same_text(f"\\frac{{{number.numerator}}}{{{number.denominator}}}", str(number))
