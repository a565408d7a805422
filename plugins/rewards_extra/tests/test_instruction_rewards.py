"""Verifiable instructions: the texts that each accepts, the forms in rows, and the score of several instructions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dovetail.interfaces import PluginContext
from dovetail_rewards_extra.config import InstructionFollowingConfig
from dovetail_rewards_extra.instruction_following import InstructionFollowing
from dovetail_rewards_extra.instructions import INSTRUCTIONS, instruction

CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["sun", "red moon"]}, ["The Sun and a red moon."], ["Sunny red moon", "sun"]),
    ("keywords:forbidden_words", {"forbidden_words": ["bad", "c++"]}, ["badly", "good"], ["Bad!", "in C++ now"]),
    ("keywords:frequency", {"keyword": "go", "frequency": 2, "relation": "at least"}, ["go, Go"], ["go going"]),
    ("keywords:frequency", {"keyword": "go", "frequency": 2, "relation": "less than"}, ["go going"], ["go go"]),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 2, "let_relation": "at least"}, ["Eve"], ["e"]),
    ("keywords:letter_frequency", {"letter": "!", "let_frequency": 1, "let_relation": "less than"}, ["a"], ["a!"]),
    ("change_case:english_lowercase", {}, ["all small, 1"], ["Small", "123"]),
    ("change_case:english_capital", {}, ["ALL BIG!"], ["ALl", "123"]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, ["NASA and A"], ["NASA and b"]),
    ("punctuation:no_comma", {}, ["none here."], ["one, two"]),
    ("startend:end_checker", {"end_phrase": "The end."}, ["So. THE END.", 'So "the end."\n'], ["The end. Or not"]),
    ("startend:quotation", {}, ['"all of it"', "“all”"], ['"half', '"', "none"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "What is it?"}, ["what is it? A cat."], ["A cat. What is it?"]),
    ("combination:two_responses", {}, ["one ****** two"], ["one", "one******one", "one ******", "a******b******c"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["it's a cat", "a b c d"], ["one two -- !"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["one two"], ["one two three"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, ["One. Two!", "One?\n\nTwo", "一。二。"], ["Dr. Who is 3.5 m tall.", "Why?!"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a\n***\nb", "***\na\n***\nb\n***"], ["a", "a\n***\n***\nb", "a\n\nb"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"}, ["a\n\n\n**Then** b"], ["a\n\nb", "Then"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] and [b c]"], ["[a] []"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["Bye\n p.p.s see you"], ["Bye P.P.S see", "P.P.S"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n- b", "x\n  * a\n  * b"], ["* a", "**a**\n* b\n---", "- a\n- b\n- c"]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* and **b c**", "*a* *b* *c*"], ["*a*", "**", "* a\n* b"]),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2}, ["SECTION 1\nx\nSECTION 2\ny"], ["SECTION 1", "SECTION a SECTION b"]),
    ("detectable_format:title", {}, ["<<A title>>\nx"], ["<< >>", "<A>"]),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n{"a": 1}\n```'], ["{", 'so {"a": 1}', "[" * 100_000]),
    ("detectable_format:constrained_response", {}, ["My answer is yes."], ["Yes."]),
]  # fmt: skip


def score(text: str, truth: Any, **config: Any) -> dict[str, Any]:
    function = InstructionFollowing(InstructionFollowingConfig(**config), PluginContext())
    return dict(function.compute_score("ifeval", text, truth))


@pytest.mark.parametrize(("name", "arguments", "kept", "broken"), CASES)
def test_each_instruction(name, arguments, kept, broken) -> None:
    row = {"instruction_id_list": [name], "kwargs": [arguments]}
    assert InstructionFollowing.check_row(InstructionFollowingConfig(), row) is None
    assert [score(text, row)["score"] for text in kept] == [1.0] * len(kept)
    assert [score(text, row)["score"] for text in broken] == [0.0] * len(broken)
    assert score(broken[0], row)["broken"] == [name]


def test_every_instruction_has_cases() -> None:
    assert {name for name, *_ in CASES} == set(INSTRUCTIONS)


ROW = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{"num_words": None}, {"num_words": 3, "relation": "at least", "keywords": None}],
}


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        json.dumps(ROW),
        [
            {"instruction": "punctuation:no_comma"},
            {"instruction": "length_constraints:number_words", "num_words": 3},
        ],
    ],
)
def test_a_row_names_its_instructions_in_several_forms(row) -> None:
    assert InstructionFollowing.check_row(InstructionFollowingConfig(), row) is None
    assert score("one two three", row)["score"] == 1.0
    result = score("one two, three", row)
    assert (result["score"], result["share"], result["all"]) == (0.0, 0.5, 0.0)
    assert score("one two, three", row, scoring="share", score=2.0)["score"] == 1.0


def test_loose_forgives_an_introduction_and_asterisks() -> None:
    row = [{"instruction": "startend:quotation"}]
    for text in ('Here you are:\n"text"', '"text"\nGood bye.', '**"text"**'):
        assert score(text, row)["score"] == 0.0
        assert score(text, row, loose=True)["score"] == 1.0


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_response_keeps_to_nothing(text) -> None:
    assert score(text, [{"instruction": "punctuation:no_comma"}], scoring="share")["score"] == 0.0


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (None, "holds no instructions"),
        ("no JSON", "holds no instructions"),
        ([], "holds no instructions"),
        ({"kwargs": []}, "holds no instructions"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "of equal lengths"),
        ([{"instruction": None}], "holds no instructions"),
        ([{"instruction": "punctuation:no_coma"}], "nearest: 'punctuation:no_comma'"),
        ([{"instruction": "keywords:existence"}], "lacks the argument(s) keywords"),
        ([{"instruction": "keywords:existence", "keywords": []}], "list of texts"),
        ([{"instruction": "keywords:existence", "keywords": ["a"], "num": 1}], "no argument 'num'"),
        (
            [{"instruction": "length_constraints:number_words", "num_words": "3"}],
            "num_words='3'; expected",
        ),
        (
            [
                {
                    "instruction": "length_constraints:number_words",
                    "num_words": 3,
                    "relation": "more",
                }
            ],
            "relation='more'; expected 'less than' or 'at least'",
        ),
    ],
)
def test_a_row_that_names_them_wrongly_is_refused(row, problem) -> None:
    assert problem in (InstructionFollowing.check_row(InstructionFollowingConfig(), row) or "")
    with pytest.raises(ValueError, match=r"instruction|lacks|not|takes"):
        score("text", row)


def test_an_instruction_of_ones_own_is_one_function() -> None:
    @instruction("mine:begins_with")
    def begins_with(text: str, *, start: str) -> bool:
        return text.startswith(start)

    try:
        row = [{"instruction": "mine:begins_with", "start": "ab"}]
        assert (score("abc", row)["score"], score("bc", row)["score"]) == (1.0, 0.0)
    finally:
        del INSTRUCTIONS["mine:begins_with"]


def test_the_instructions_of_the_page_are_those_of_the_registry() -> None:
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    table = page.partition("| group | instructions |")[2].partition("\n\n")[0]
    named = {
        f"{group}:{name}"
        for group, names in re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert named == set(INSTRUCTIONS)
    row = json.loads(page.partition("```json\n")[2].partition("```")[0])
    assert InstructionFollowing.check_row(None, row) is None
