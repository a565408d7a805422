"""The end of an assistant's turn is trained on, also under templates that write no end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from dataset_rows import turns

from dovetail_datasets.encoding import TextEncoder
from dovetail_datasets.end_of_turn import TurnEnds
from dovetail_datasets.example_rows import RawExample
from dovetail_datasets.example_texts import texts_of
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import OBSERVER

GAP = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}{# <|user|> <|assistant|> #}"
"""A template with a line break between a turn and the mark of the next turn."""
WORDS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
"""A template without special tokens."""
STARS = WORDS.replace("\n{% endfor", " ***\n{% endfor")
"""A template that ends a turn with plain text."""


CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLS = [
    *turns("one"),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "2"},
    *turns("", "dos")[1:],
]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Makes a model's directory without weights, whose files name these end tokens of a template's tokenizer."""

    def make(template: str, *ends: str) -> str:
        ids = template_tokenizer(template).convert_tokens_to_ids(list(ends))
        (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        return str(tmp_path)

    return make


MARKS = ("<|user|>", "<|observation|>")


@pytest.mark.parametrize(
    ("template", "ends", "messages", "trained"),
    [
        (OBSERVER, MARKS, turns("a", "b"), "b<|user|>"),
        (OBSERVER, MARKS, turns("a", "b", "c", "d"), "b<|user|>…d<|user|>"),
        (
            OBSERVER,
            MARKS,
            CALLS,
            '\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|observation|>…dos<|user|>',
        ),
        (
            OBSERVER,
            MARKS,
            CALLS[:2],
            '\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|observation|>',
        ),
        (
            OBSERVER,
            MARKS,
            [*turns("a", "b"), {"role": "system", "content": "c"}, *turns("d", "e")],
            "b…e<|user|>",
        ),
        # Generation does not stop at the marks.
        (OBSERVER, ("</s>",), turns("a", "b"), "b</s>"),
        (OBSERVER, ("</s>",), turns("a", "b", "c", "d"), "b…d</s>"),
        (GAP, ("<|user|>",), turns("a", "b", "c", "d"), "b\n<|user|>…d\n<|user|>"),
        (GAP, ("</s>",), turns("a", "b "), "b </s>"),
        # An end mark that the answer spells does not count.
        (OBSERVER, MARKS, turns("a", "b<|user|>"), "b<|user|><|user|>"),
        (OBSERVER, MARKS, turns("a", "b<|user|>", "c", "d"), "b<|user|><|user|>…d<|user|>"),
        (WORDS, (), turns("a", "b</s>"), "b</s></s>"),
        (WORDS, (), turns("a", "b"), "b</s>"),
        (WORDS, (), turns("a", "b", "c", "d"), "b\n…d</s>"),
        # Templates that write an end keep it.
        (STARS, (), turns("a", "b"), "b ***\n"),
        (STARS.replace("***", "<|end|>"), (), turns("a", "b", "c", "d"), "b <|end|>…d <|end|>"),
    ],
)
def test_a_turn_ends_with_a_token_at_which_generation_stops(
    read, model, template: str, ends: tuple[str, ...], messages: Any, trained: str
) -> None:
    found = read(template, [{"messages": messages}], model=model(template, *ends))
    assert found.trained == [trained]
    said = [what for what in found.left_out if "no end of a turn" in what]
    assert bool(said) is any(part in ("b", "b\n") for part in trained.split("…"))


@pytest.mark.parametrize("weights", [(1, 0), (0, 1), (1, 1)])
def test_turns_that_are_not_trained_on_get_no_end(read, model, weights: tuple[int, int]) -> None:
    messages = turns("a", "b", "c", "d")
    for place, weight in zip((1, 3), weights, strict=True):
        messages[place]["weight"] = weight
    found = read(OBSERVER, [{"messages": messages}], model=model(OBSERVER, *MARKS))
    kept = [f"{text}<|user|>" for text, weight in zip("bd", weights, strict=True) if weight]
    assert found.trained == ["…".join(kept)]
    assert found.left_out == ()


def test_both_answers_of_a_pair_end(read, model) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    found = read(OBSERVER, [pair], "preferences", model=model(OBSERVER, *MARKS))
    assert found.trained == ["b<|user|>", "c<|user|>"]
    rated = {"prompt": "a", "response": "b", "label": True}
    found = read(OBSERVER, [rated], "unpaired_preferences", model=model(OBSERVER, *MARKS))
    assert found.trained == ["b<|user|>"]


def test_special_tokens_are_ends_where_the_models_files_are_not_there(read) -> None:
    assert read(OBSERVER, [{"messages": turns("a", "b")}], model="/no/model").trained == [
        "b<|user|>"
    ]


def test_without_an_end_of_sequence_a_turn_is_what_the_template_writes() -> None:
    tokenizer = template_tokenizer(WORDS)
    tokenizer.eos_token = None
    example = RawExample(prompt=turns("a"), responses=(turns("", "b")[1:],))
    (text,) = texts_of(TextEncoder(tokenizer), [example], TurnEnds(tokenizer))
    assert text[-1] == "b\n"


@pytest.mark.parametrize("marks", ["answer", "answer and end"])
def test_blocks_that_leave_out_the_end_are_named_with_their_rows(read, marks: str) -> None:
    end = "<|end|>" if marks == "answer and end" else ""
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        + end
        + "{% endgeneration %}"
        + ("" if end else "<|end|>")
        + "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    rows = [{"messages": turns("a", "b")}, {"messages": turns("a", "b", "c", "d")}]
    found = read(template, rows)
    assert found.trained == [f"b{end}", f"b{end}…d{end}"]
    assert bool(found.left_out) is (marks == "answer")
    if found.left_out:
        assert re.search(r"no end of a turn .*2 of 2 rows .*rows.jsonl, line 1", found.left_out[0])


@pytest.mark.nightly
@pytest.mark.parametrize("tools", [False, True])
def test_the_ends_of_glm_are_those_of_trls_training_template(
    read, model, trl_templates, tools: bool
) -> None:
    messages = CALLS if tools else turns("a", "b", "c", "d")
    ours, theirs = (trl_templates[name] for name in ("glm4moe", "glm4moe_training"))
    row = [{"messages": messages}]
    found = read(ours, row, model=model(ours, *MARKS))
    assert found.trained == read(theirs, row).trained
    assert found.left_out == ()
