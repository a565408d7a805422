"""Multiple choice, similarity and JSON: the answer that each function finds in a response, and its score."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dovetail.errors import ConfigError, PluginNeedsError
from dovetail.interfaces import PluginContext
from dovetail_rewards_extra import fuzzy_match, json_schema
from dovetail_rewards_extra.config import FuzzyMatchConfig, JsonSchemaConfig, MultipleChoiceConfig
from dovetail_rewards_extra.fuzzy_match import FuzzyMatch, token_f1
from dovetail_rewards_extra.json_schema import JsonSchema
from dovetail_rewards_extra.multiple_choice import MultipleChoice


def choice(text: str, truth: Any = "B", **config: Any) -> dict[str, Any]:
    function = MultipleChoice(MultipleChoiceConfig(**config), PluginContext())
    return dict(function.compute_score(None, text, truth))


def fuzzy(text: str, truth: Any, **config: Any) -> dict[str, Any]:
    function = FuzzyMatch(FuzzyMatchConfig(**config), PluginContext())
    return dict(function.compute_score(None, text, truth))


def schema(text: str, truth: Any = None, **config: Any) -> dict[str, Any]:
    function = JsonSchema(JsonSchemaConfig(**config), PluginContext())
    return dict(function.compute_score(None, text, truth))


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"so \boxed{B}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{\mathbf{B}}", "B"),
        (r"\boxed{B. 4 cm}", "B"),
        (r"\boxed{AB}", None),
        (r"\boxed{4}", None),
        ("<answer>B) Paris</answer>", "B"),
        ("<answer>(B)</answer>", "B"),
        ("<answer>Paris</answer>", None),
        ("the answer is (B).", "B"),
        ("The answer is: B", "B"),
        ("The answer is：B", "B"),
        ("The correct answer is option B because of A", "B"),
        ("**Answer:** B", "B"),
        ("Answer: **B**", "B"),
        ("Answer: $\\text{B}$", "B"),
        ("Answer: A\nNo. Answer: B", "B"),
        ("Answer：B", "B"),
        ("A is wrong.\n(B)", "B"),
        ("A is wrong.\n**B**\n", "B"),
        ("A is wrong.\nB.", "B"),
        ("the answer is A dog", None),
        ("the answer is (A) dog", "A"),
        ("Answer: I think so", None),
        ("Answer: Because", None),
        ("Answer: Z", None),
        ("Answer: b", None),
        ("I like B", None),
        ("", None),
    ],
)
def test_a_letter_counts_where_it_is_stated_as_the_choice(text, letter) -> None:
    parts = choice(text)
    assert parts["pred"] == letter
    assert parts["score"] == float(letter == "B")
    assert parts["format"] == float(letter is not None)


def test_the_places_are_asked_in_order_and_all_scores_are_set() -> None:
    text = r"Answer: C. In short: \boxed{B}"
    assert choice(text)["pred"] == "B"
    assert choice(text, extract=("statement", "boxed"))["pred"] == "C"
    assert choice("not A but B, I say", extract=("last",), choices="ABCD")["pred"] == "B"
    weights = {"score": 2.0, "format_score": 0.1, "miss_score": -1.0}
    given_ = [choice(text, **weights)["score"] for text in ("(B)", "(C)", "none")]
    assert given_ == [2.0, 0.1, -1.0]


@pytest.mark.parametrize("truth", ["B", "b", "(B)", "B.", ["A", "B"]])
def test_a_choice_has_a_letter_as_ground_truth(truth) -> None:
    assert MultipleChoice.check_row(MultipleChoiceConfig(), truth) is None
    assert choice("(B)", truth)["score"] == 1.0


@pytest.mark.parametrize("truth", ["Paris", "", None, 1, [], "Z", ["A", "x y"]])
def test_a_choice_refuses_what_is_no_letter(truth) -> None:
    assert "ABCDEFGHIJ" in (MultipleChoice.check_row(MultipleChoiceConfig(), truth) or "")


def test_choices_are_capital_letters() -> None:
    with pytest.raises(ValueError, match="choices"):
        MultipleChoiceConfig(choices="abc")


def f1_of(answer: str, truth: str) -> float:
    """Compute the token F1 of the SQuAD paper."""
    words, wanted = answer.split(), truth.split()
    if not words or not wanted:
        return float(words == wanted)
    left, common = list(wanted), 0
    for word in words:
        if word in left:
            left.remove(word)
            common += 1
    if common == 0:
        return 0.0
    precision, recall = common / len(words), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def edits(a: str, b: str) -> int:
    """Compute the edit distance by Wagner and Fischer's table."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        above, row = row, [i]
        for j, right in enumerate(b, 1):
            row.append(min(row[-1] + 1, above[j] + 1, above[j - 1] + (left != right)))
    return row[-1]


words = st.lists(st.sampled_from(["a", "b", "cat", "dog"]), max_size=8).map(" ".join)


@given(answer=words, truth=words)
def test_token_f1_is_the_harmonic_mean_of_precision_and_recall(answer, truth) -> None:
    assert token_f1(answer, truth) == pytest.approx(f1_of(answer, truth))


@given(answer=st.text("abc", max_size=12), truth=st.text("abc", min_size=1, max_size=12))
def test_edit_likeness_is_one_less_the_distance_over_the_longer_length(answer, truth) -> None:
    parts = fuzzy(answer, truth, metric="edit", normalise=False)
    assert parts["similarity"] == pytest.approx(
        1 - edits(answer, truth) / max(len(answer), len(truth))
    )


@pytest.mark.parametrize(
    ("text", "truth", "config", "score"),
    [
        ("The Cat sat.", "a cat sat", {}, 1.0),
        ("The Cat", "cat", {"normalise": False}, 0.0),
        ("the cat sat", "the cat", {}, 2 / 3),
        ("cat", ["dog", "cat"], {}, 1.0),
        ("dog", "cat", {}, 0.0),
        ("x y", "x", {"threshold": 0.6}, 1.0),
        ("x y", "x", {"threshold": 0.7}, 0.0),
        ("<a>cat</a>", "cat", {"extract": "<a>(.*?)</a>", "score": 2.0}, 2.0),
        ("cat", "cat", {"extract": "<a>(.*?)</a>"}, 0.0),
        ("12", 12, {}, 1.0),
        ("kitten", "sitting", {"metric": "edit"}, 4 / 7),
    ],
)
def test_fuzzy_match(text, truth, config, score) -> None:
    assert fuzzy(text, truth, **config)["score"] == pytest.approx(score)


def test_the_text_that_was_compared_is_the_answer() -> None:
    assert fuzzy("The  Cat!", "x")["pred"] == "cat"
    assert fuzzy("cat", "x", extract="<a>(.*)</a>")["pred"] is None


def test_missing_packages_are_named(monkeypatch) -> None:
    monkeypatch.setattr(fuzzy_match.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PluginNeedsError, match="rapidfuzz"):
        FuzzyMatch(FuzzyMatchConfig(metric="edit"), PluginContext())
    assert fuzzy("a b", "a b")["score"] == 1.0
    with pytest.raises(PluginNeedsError, match="jsonschema") as error:
        JsonSchema(JsonSchemaConfig(), PluginContext())
    assert "dovetail-rewards-extra[json]" in (error.value.hint or "")
    assert json_schema.importlib.util is fuzzy_match.importlib.util


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"$ref": "#/$defs/age"},
        "tags": {"type": "array"},
    },
    "required": ["name", "age"],
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


@pytest.mark.parametrize(
    ("text", "parsed", "valid", "fields"),
    [
        ('{"name": "Ada", "age": 36}', 1, 1, 1.0),
        ('{"name": "Ada", "age": 36, "more": null}', 1, 1, 1.0),
        ('{"name": "Ada", "age": -1}', 1, 0, 0.5),
        ('{"name": "Ada"}', 1, 0, 0.5),
        ('{"name": "Ada", "age": 36, "tags": 1}', 1, 0, 1.0),
        ("[]", 1, 0, 0.0),
        ("3", 1, 0, 0.0),
        ('Here:\n```json\n{"name": "Ada", "age": 36}\n```\nDone.', 1, 1, 1.0),
        ('```\n{}\n```\n```json\n{"name": "Ada", "age": 1}\n```', 1, 1, 1.0),
        ('```\n{"name": "Ada", "age": 1}\n```\nand\n```json\n{', 1, 1, 1.0),
        ('Here: {"name": "Ada", "age": 36}', 0, 0, 0.0),
        ('{"name": "Ada", "age": NaN}', 0, 0, 0.0),
        ("{'name': 'Ada'}", 0, 0, 0.0),
        ("", 0, 0, 0.0),
    ],
)
def test_json_is_parsed_and_validated(text, parsed, valid, fields) -> None:
    weights = {"parse_score": 0.1, "valid_score": 0.5, "fields_score": 0.4}
    for where in ({"schema": PERSON}, {"truth": PERSON}, {"truth": json.dumps(PERSON)}):
        result = schema(text, **where, **weights)
        assert (result["parsed"], result["valid"]) == (parsed, valid)
        assert result["fields"] == pytest.approx(fields)
        assert result["score"] == pytest.approx(0.1 * parsed + 0.5 * valid + 0.4 * fields)


@pytest.mark.parametrize(
    ("text", "truth", "share"),
    [
        ('{"a": 1, "b": [1, 2]}', {"a": 1, "b": [1, 2]}, 1.0),
        ('{"a": 1, "b": [1, 3]}', {"a": 1, "b": [1, 2]}, 2 / 3),
        ('{"a": 1.0}', '{"a": 1}', 1.0),
        ('{"a": true}', {"a": 1}, 0.0),
        ('{"a": null}', {"a": None}, 1.0),
        ("{}", {"a": None}, 0.0),
        ("[]", {"a": {"b": 1, "c": 2}}, 0.0),
        ('{"a": {"b": 1}}', {"a": {"b": 1, "c": 2}}, 0.5),
        ("[1]", [], 0.0),
        ("7", 7, 1.0),
    ],
)
def test_json_values_are_compared_field_by_field(text, truth, share) -> None:
    assert schema(text, truth, compare=True)["fields"] == pytest.approx(share)


def test_the_answer_of_json_is_the_value_in_one_order() -> None:
    assert schema('{"b":1, "a":2}', {})["pred"] == schema('{"a":2,"b":1}', {})["pred"]


@pytest.mark.parametrize(
    ("config", "truth", "problem"),
    [
        ({}, {"type": "object"}, None),
        ({}, '{"type": "object"}', None),
        ({}, {"type": "objekt"}, "'objekt' is not valid under any of the given schemas"),
        ({}, "object", "expected a JSON object"),
        ({}, None, "expected a JSON object"),
        ({"schema": {}}, None, None),
        ({"schema": {}, "compare": True}, '{"a": 1}', None),
        ({"compare": True}, "{", "not a JSON value"),
        ({"compare": True}, None, "not a JSON value"),
    ],
)
def test_json_ground_truths_are_checked(config, truth, problem) -> None:
    complaint = JsonSchema.check_row(JsonSchemaConfig(**config), truth)
    assert complaint is None if problem is None else problem in (complaint or "")


def test_a_schema_that_is_none_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'objekt'"):
        JsonSchema(JsonSchemaConfig(schema={"type": "objekt"}), PluginContext())


def test_a_schema_reaches_no_network() -> None:
    with pytest.raises(Exception, match=r"example\.invalid"):
        schema("{}", schema={"$ref": "http://example.invalid/schema.json"})
