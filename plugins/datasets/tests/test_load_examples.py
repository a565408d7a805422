"""Rows to examples: the trained tokens in every format, limits, and the error of each bad row."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from dataset_rows import InMemory, files_source, sequential, trained as trained_runs, turns
from hypothesis import given, strategies as st

from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.errors import ConfigError, DataError, ModelError
from dovetail.interfaces import Examples
from dovetail.sections import DataSection, ModelSection
from dovetail_datasets.example_rows import Example, TrainedResponse
from dovetail_datasets.load_examples import load_datasets, load_examples
from dovetail_datasets.prompts import load_prompts

END = "<|im_end|>"
OWN_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that adds its own system message if there is none, like those of SmolLM2 and Qwen2.5."""
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes a thinking part only in the last turn, like Qwen3's."""


def load(
    tokenizer: Any, rows: list[dict[str, Any]], kind: Examples = "conversations", **section: Any
) -> tuple[Example, ...]:
    """Return the examples of rows, under a `DataSection` with these settings."""
    model = ModelSection(path="my/model")
    data = DataSection(**section)
    return load_examples(InMemory(rows), ["x"], tokenizer, data, model, kind).prompts  # type: ignore[return-value]


def trained(tokenizer: Any, answer: TrainedResponse) -> str:
    """Return the text of the trained tokens, with | in place of untrained tokens between them."""
    return "|".join(trained_runs(tokenizer, answer))


def test_every_assistant_turn_is_trained_on_with_its_end_and_nothing_else(tokenizer) -> None:
    (example,) = load(tokenizer, [{"messages": turns("2 + 2 =", "4", "and 1 more?", "5")}])
    (answer,) = example.answers
    assert tokenizer.decode(example.prompt_ids) == (
        f"<|im_start|>user\n2 + 2 ={END}\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(answer.ids) == (
        f"4{END}\n<|im_start|>user\nand 1 more?{END}\n<|im_start|>assistant\n5{END}"
    )
    assert trained(tokenizer, answer) == f"4{END}|5{END}"
    assert (answer.ids.dtype, answer.mask.dtype) == (np.int64, np.bool_)
    assert example.raw == turns("2 + 2 =")


def test_what_follows_the_last_assistant_turn_is_left_out(tokenizer) -> None:
    (with_more,) = load(tokenizer, [{"messages": turns("a", "b", "thanks")}])
    (without,) = load(tokenizer, [{"messages": turns("a", "b")}])
    assert with_more.answers[0].ids.tolist() == without.answers[0].ids.tolist()


@pytest.mark.parametrize("column", ["response", "completion"])
@pytest.mark.parametrize("as_messages", [True, False])
def test_a_prompt_with_its_response_is_a_conversation_of_which_the_response_is_trained_on(
    tokenizer, column, as_messages
) -> None:
    prompt, response = turns("a", "b", "c"), turns("d", first="assistant")
    row = {"prompt": prompt, column: response if as_messages else "d"}
    (example,) = load(tokenizer, [row])
    assert trained(tokenizer, example.answers[0]) == f"d{END}"
    whole = tokenizer.decode([*example.prompt_ids, *example.answers[0].ids])
    assert whole == (
        f"<|im_start|>user\na{END}\n<|im_start|>assistant\nb{END}\n<|im_start|>user\nc{END}\n<|im_start|>assistant\nd{END}"
    )
    (of_texts,) = load(tokenizer, [{"prompt": "c", column: "d"}])
    (of_turns,) = load(tokenizer, [{"messages": turns("c", "d")}])
    assert of_texts.prompt_ids.tolist() == of_turns.prompt_ids.tolist()


def test_a_conversation_may_be_in_a_column_of_another_name(tokenizer) -> None:
    row = {"prompt": turns("2 + 2 =", "4")}
    (example,) = load(tokenizer, [row], messages_key="prompt")
    assert trained(tokenizer, example.answers[0]) == f"4{END}"
    with pytest.raises(DataError, match=r"'chats' \(data.messages_key\)"):
        load(tokenizer, [row], messages_key="chats")


def test_texts_may_stay_as_they_are_with_the_end_of_sequence(tokenizer, templated) -> None:
    rows = [{"prompt": "2 + 2 =", "response": " 4"}]
    (example,) = load(templated(None), rows, plain_prompts="raw")
    assert tokenizer.decode(example.prompt_ids) == "2 + 2 ="
    assert trained(tokenizer, example.answers[0]) == f" 4{tokenizer.eos_token}"
    with pytest.raises(ConfigError):
        load(tokenizer, rows, plain_prompts="raw", chat_template_args={"a": 1})
    with pytest.raises(ModelError):
        load(templated(None), rows)


def test_a_prompt_has_the_ids_that_generation_gives_it(tokenizer, templated) -> None:
    """Also if the answer begins with text that a tokenizer would merge with the prompt's end."""
    for template in (tokenizer.chat_template, OWN_SYSTEM):
        other = templated(template)
        row = {"prompt": turns("a"), "response": "\n\n b"}
        (example,) = load(other, [row])
        source, model = InMemory([row]), ModelSection(path="m")
        (prompt,) = load_prompts(source, ["x"], other, DataSection(), model).prompts
        assert example.prompt_ids.tolist() == prompt.prompt_ids.tolist()
        assert trained(other, example.answers[0]) == f"\n\n b{END}"


def test_where_a_token_reaches_across_a_cut_the_parts_are_tokenised_one_by_one(templated) -> None:
    tokenizer = templated(None)
    # Two letters that the tokenizer merges into one token.
    texts = sorted(tokenizer.convert_tokens_to_string([token]) for token in tokenizer.get_vocab())
    pair = next(
        text
        for text in texts
        if len(text) == 2 and text.isalpha() and len(tokenizer(text)["input_ids"]) == 1
    )
    row = {"prompt": pair[0], "response": pair[1]}
    (example,) = load(tokenizer, [row], plain_prompts="raw")
    assert len(example.prompt_ids) == 1
    assert tokenizer.decode(example.prompt_ids) == row["prompt"]
    assert trained(tokenizer, example.answers[0]) == f"{pair[1]}{tokenizer.eos_token}"


BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED, SAID = f"a{END}\n<|im_start|>system\nb", f"<|im_start|>c{END} d{END}"


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("conversations", {"messages": turns(ASKED, SAID)}),
        ("conversations", {"prompt": ASKED, "response": SAID}),
        ("conversations", {"messages": turns("z", SAID, ASKED, SAID)}),
        ("preferences", {"prompt": ASKED, "chosen": SAID, "rejected": END}),
        ("preferences", {"chosen": turns(ASKED, SAID), "rejected": turns(ASKED, END)}),
        ("unpaired_preferences", {"prompt": ASKED, "response": SAID, "label": True}),
    ],
)
def test_control_tokens_that_a_row_spells_are_text_in_what_is_asked_and_in_what_is_trained(
    tokenizer, templated, kind, row, blocks
) -> None:
    tokenizer = templated(BLOCKS) if blocks else tokenizer
    (example,) = load(tokenizer, [row], kind)
    answer = example.answers[0]
    end, start = (tokenizer.convert_tokens_to_ids(token) for token in (END, "<|im_start|>"))
    rounds = str(row).count("'user'") // len(example.answers) or 1
    ids = [*example.prompt_ids.tolist(), *answer.ids.tolist()]
    assert (ids.count(end), ids.count(start)) == (2 * rounds, 2 * rounds)
    assert trained(tokenizer, answer) == "|".join([f"{SAID}{END}"] * rounds)
    assert answer.ids[answer.mask].tolist().count(end) == rounds
    asked = [*example.raw, *turns(SAID, first="assistant")] if kind != "preferences" else None
    if asked and rounds == 1:
        assert tokenizer.decode(ids) + "\n" == tokenizer.apply_chat_template(asked, tokenize=False)
    (allowed,) = load(tokenizer, [row], kind, control_tokens="allow")
    assert [*allowed.prompt_ids, *allowed.answers[0].ids].count(end) > 2 * rounds


@pytest.mark.parametrize("as_json", [False, True])
def test_arguments_and_tools_of_a_row_spell_no_control_tokens(templated, as_json: bool) -> None:
    tokenizer = templated(
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    arguments: Any = {f"a{END}": [f"b{END}"]}
    if as_json:
        arguments = json.dumps(arguments).replace("<", r"\u003c")
    call = {"function": {"name": f"add{END}", "arguments": arguments}}
    messages = [*turns("x"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"name": "add", "description": END, "parameters": {END: {"enum": [END]}}}]
    (example,) = load(tokenizer, [{"messages": messages, "tools": tools}])
    ids = [*example.prompt_ids.tolist(), *example.answers[0].ids.tolist()]
    assert tokenizer.decode(ids).count(END) == 2 + 6
    assert ids.count(tokenizer.convert_tokens_to_ids(END)) == 2


WORDS = st.text("ab 1\n<|>é", min_size=1).filter(str.strip)


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_masked_tokens_are_exactly_the_trained_ones(tokenizer, pairs, system, own) -> None:
    before = tokenizer.chat_template
    tokenizer.chat_template = OWN_SYSTEM if own else before
    try:
        messages = turns(*(text for pair in pairs for text in pair))
        first = [{"role": "system", "content": "Be brief."}] if system else []
        limits = {"max_prompt_length": 9999, "max_response_length": 9999}
        (example,) = load(tokenizer, [{"messages": [*first, *messages]}], **limits)
        (answer,) = example.answers
        whole = tokenizer.apply_chat_template([*first, *messages], tokenize=False)
    finally:
        tokenizer.chat_template = before
    assert trained(tokenizer, answer) == "|".join(said + END for _, said in pairs)
    assert tokenizer.decode([*example.prompt_ids, *answer.ids]) == whole.rstrip()


def test_a_template_that_rewrites_earlier_turns_is_one_error_that_names_the_row(templated) -> None:
    tokenizer = templated(THINKING)
    single = {"messages": turns("a", "b")}
    (example,) = load(tokenizer, [single])
    assert trained(tokenizer, example.answers[0]) == f"<think>\n\n</think>\n\nb{END}"
    with pytest.raises(DataError, match=r"^row 1: .* message 3"):
        load(tokenizer, [single, {"messages": turns("a", "b", "c", "d")}])


# Preference pairs


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": turns("q"), "chosen": turns("good", first="assistant"), "rejected": "bad"},
        {"chosen": turns("q", "good"), "rejected": turns("q", "bad")},
        {"prompt": "q", "chosen": turns("q", "good"), "rejected": turns("q", "bad")},
    ],
    ids=["texts", "messages", "implicit prompt", "implicit prompt with a copy of its text"],
)
def test_a_pair_has_one_prompt_and_two_answers_the_chosen_one_first(tokenizer, row) -> None:
    (example,) = load(tokenizer, [row], "preferences")
    assert (
        tokenizer.decode(example.prompt_ids) == f"<|im_start|>user\nq{END}\n<|im_start|>assistant\n"
    )
    assert [trained(tokenizer, answer) for answer in example.answers] == [f"good{END}", f"bad{END}"]


def test_answers_of_several_turns_are_trained_on_in_the_assistants_turns(tokenizer) -> None:
    row = {"chosen": turns("q", "a", "b", "c"), "rejected": turns("q", "d")}
    (example,) = load(tokenizer, [row], "preferences")
    assert [trained(tokenizer, answer) for answer in example.answers] == [
        f"a{END}|c{END}",
        f"d{END}",
    ]


# Limits


@pytest.mark.parametrize(
    ("limits", "part"),
    [({"max_prompt_length": 20}, "prompt"), ({"max_response_length": 20}, "response")],
)
def test_longer_ones_are_counted_and_left_out_or_refused(tokenizer, limits, part) -> None:
    rows = [{"messages": turns("a", "b")}, {"messages": turns("a" * 30, "b" * 30)}]
    source, model = InMemory(rows), ModelSection(path="m")
    found = load_examples(source, ["x"], tokenizer, DataSection(**limits), model, "conversations")
    assert [example.index for example in found.prompts] == [0]
    assert found.filtered_overlong == 1
    with pytest.raises(DataError, match=f"^row 1: .*{part} .* tokens, .*data.max_{part}"):
        load(tokenizer, rows, overlong_prompts="error", **limits)
    with pytest.raises(DataError, match=r"no conversations of x .*1 in all"):
        load(tokenizer, rows[1:], **limits)


def test_an_answer_that_the_prompt_begins_is_refused(tokenizer) -> None:
    begun = turns("q", "so")
    for kind, row in (
        ("conversations", {"prompt": begun, "response": "x"}),
        ("conversations", {"prompt": begun, "response": turns("", "x")[1:]}),
        ("preferences", {"prompt": begun, "chosen": "x", "rejected": "y"}),
        ("unpaired_preferences", {"prompt": begun, "response": "x", "label": True}),
    ):
        with pytest.raises(DataError, match=r"row 0: 'prompt' .*assistant"):
            load(tokenizer, [row], kind)
    (found,) = load(tokenizer, [{"prompt": begun, "response": turns("r", "x")}])
    assert tokenizer.decode(found.answers[0].ids.tolist()).startswith("x")


@pytest.mark.parametrize("limit", [1, 4, 20, 50])
def test_longer_conversations_are_cut_behind_the_last_trained_token_within_the_limit(
    tokenizer, limit
) -> None:
    rows = [{"messages": turns("a", "b" * 9, "c" * 30, "d")}, {"messages": turns("a", "b")}]
    whole = load(tokenizer, rows)
    cut = load(tokenizer, rows, overlong_prompts="truncate_right", max_response_length=limit)
    for before, after in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(after.prompt_ids, before.prompt_ids)
        (answer,), (all_of_it,) = after.answers, before.answers
        length = len(answer.ids)
        assert length <= limit
        assert answer.mask[-1]
        assert answer.mask.sum() == all_of_it.mask[:limit].sum()
        assert answer.ids.tolist() == all_of_it.ids[:length].tolist()
        assert after.lost == len(all_of_it.ids) - length


def test_a_conversation_with_too_long_a_prompt_is_left_out_where_others_are_cut(tokenizer) -> None:
    rows = [{"messages": turns("a", "b" * 30)}, {"messages": turns("a" * 30, "b" * 30)}]
    limits = {"max_prompt_length": 40, "max_response_length": 3}
    found = load(tokenizer, rows, overlong_prompts="truncate_right", **limits)
    assert [(example.index, len(example.answers[0].ids)) for example in found] == [(0, 3)]


@pytest.mark.parametrize("kind", ["preferences", "unpaired_preferences"])
def test_answers_that_are_compared_or_rated_are_not_cut(tokenizer, kind) -> None:
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b", "response": "a", "label": True}]
    with pytest.raises(
        ConfigError, match=f"truncate_right .*; {kind.replace('_', ' ')} can't be truncated"
    ):
        load(tokenizer, rows, kind, overlong_prompts="truncate_right")


MODES = ["truncate_left", "truncate_right", "truncate_middle"]


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("limit", [1, 5, 23, 24, 40, 77, 200])
def test_conversations_are_cut_to_a_limit_on_the_whole(tokenizer, how, limit) -> None:
    rows = [
        {"messages": turns("ab" * 9, "b" * 9, "c" * 30, "d" * 7)},
        {"messages": turns("a", "b")},
    ]
    limits = {
        "max_prompt_length": 1,
        "max_response_length": 1,
    }  # the limit on the whole replaces them
    whole = load(tokenizer, rows, max_length=10_000, **limits)
    source, model = InMemory(rows), ModelSection(path="m")
    section = DataSection(overlong_prompts=how, max_length=limit, **limits)
    cut = {}
    with suppress(DataError):  # raised if no example is left
        found = load_examples(source, ["x"], tokenizer, section, model, "conversations")
        cut = {example.index: example for example in found.prompts}
    for before in whole:
        (answer,) = before.answers
        ids = [*before.prompt_ids.tolist(), *answer.ids.tolist()]
        trained = [False] * len(before.prompt_ids) + answer.mask.tolist()
        rest = limit // 2 if how == "truncate_middle" else 0 if how == "truncate_left" else limit
        places = [p for p in range(len(ids)) if p < rest or p >= len(ids) - limit + rest]
        places = list(range(len(ids))) if len(ids) <= limit else places
        # A trained token stays trained if it is kept and is not the first token.
        kept = [p for p in places[1:] if trained[p]]
        if not kept or (how == "truncate_right" and len(before.prompt_ids) >= limit):
            assert before.index not in cut
            continue
        after = cut[before.index]
        (own,) = after.answers
        assert own.mask[0]
        assert own.mask[-1]
        last = places.index(kept[-1]) + 1
        assert [*after.prompt_ids, *own.ids] == [ids[p] for p in places[:last]]
        first = places.index(kept[0])
        assert own.mask.tolist() == [trained[p] for p in places[first:last]]
        assert after.lost == len(ids) - len(after.prompt_ids) - len(own.ids)


@pytest.mark.parametrize("how", ["truncate_left", "truncate_middle"])
def test_a_beginning_is_cut_only_where_the_whole_has_a_limit(tokenizer, how) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_length") as error:
        load(tokenizer, [{"messages": turns("a", "b")}], overlong_prompts=how)
    assert how in error.value.message


def test_an_example_longer_than_the_whole_allows_is_refused_or_counted(tokenizer) -> None:
    rows = [{"messages": turns("a", "b")}, {"messages": turns("a" * 30, "b" * 30)}]
    found = load(tokenizer, rows, max_length=40, max_response_length=1)
    assert [example.index for example in found] == [0]
    with pytest.raises(DataError, match=r"^row 1: the example has .* more than data.max_length=40"):
        load(tokenizer, rows, max_length=40, overlong_prompts="error")


def test_a_pair_is_too_long_where_one_of_its_answers_is(tokenizer) -> None:
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": "b" * 40},
    ]
    found = load(tokenizer, rows, "preferences", max_response_length=20)
    assert [example.index for example in found] == [0]


# Which turns, and tools

TOOLS = (
    "{% if tools %}{% for t in tools %}<tool>{{ t['function']['name'] }}</tool>{% endfor %}{% endif %}"
    + OWN_SYSTEM
)


@pytest.mark.parametrize(
    ("weights", "which", "expected"),
    [
        ((None, None, None), "all", "b<|im_end|>|d<|im_end|>|f<|im_end|>"),
        ((None, None, None), "last", "f<|im_end|>"),
        ((0, 1, 0), "all", "d<|im_end|>"),
        ((1, None, 0), "last", "d<|im_end|>"),
    ],
)
def test_weights_and_the_setting_choose_the_turns(tokenizer, weights, which, expected) -> None:
    messages = turns("a", "b", "c", "d", "e", "f")
    for message, weight in zip(messages[1::2], weights, strict=True):
        if weight is not None:
            message["weight"] = weight
    (example,) = load(tokenizer, [{"messages": messages}], trained_turns=which)
    assert trained(tokenizer, example.answers[0]) == expected
    untrained = turns("a", "b", "c", "d", "e", "f")[: len(example.raw)]
    assert [message["content"] for message in example.raw] == [m["content"] for m in untrained]


def test_the_last_turn_alone_fits_a_template_that_rewrites_earlier_ones(templated) -> None:
    row = {"messages": turns("a", "b", "c", "d")}
    (example,) = load(templated(THINKING), [row], trained_turns="last")
    assert trained(templated(THINKING), example.answers[0]).endswith("d<|im_end|>")


def test_tools_are_in_the_prompt_of_their_row_alone(templated) -> None:
    tokenizer = templated(TOOLS)
    tool = {"type": "function", "function": {"name": "search", "strict": None}}
    rows: list[dict[str, Any]] = [
        {"messages": turns("a", "b"), "tools": tools}
        for tools in ([tool], None, json.dumps([tool]), [])
    ]
    prompts = [tokenizer.decode(e.prompt_ids.tolist()) for e in load(tokenizer, rows)]
    assert [text.startswith("<tool>search</tool>") for text in prompts] == [True, False] * 2
    assert prompts[0].removeprefix("<tool>search</tool>") == prompts[1]
    assert prompts[0] == prompts[2]


def test_tools_that_nothing_would_write_are_refused(tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "search"}}
    with pytest.raises(DataError, match=r"'tools', .*template"):
        load(tokenizer, [{"messages": turns("a", "b"), "tools": [tool]}])
    with pytest.raises(DataError, match=r"row 0: .*'tools'.* texts"):
        load(tokenizer, [{"prompt": "a", "response": "b", "tools": [tool]}], plain_prompts="raw")


# Refusals


def test_results_of_tools_and_two_questions_in_a_row_are_in_order(tokenizer) -> None:
    tool = {"role": "tool", "content": "1"}
    messages = [*turns("a"), *turns("b", "<tool_call>", first="user"), tool, tool]
    (example,) = load(tokenizer, [{"messages": [*messages, *turns("4", first="assistant")]}])
    assert trained(tokenizer, example.answers[0]) == f"<tool_call>{END}|4{END}"


def test_the_format_of_sharegpt_is_named_with_what_to_rename(tokenizer) -> None:
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    with pytest.raises(DataError, match=r"no column 'messages'(?s:.)*rename .*'from' to 'role'"):
        load(tokenizer, [row])


GOOD: dict[str, dict[str, Any]] = {
    "conversations": {"messages": turns("a", "b")},
    "responses": {"prompt": "a", "response": "b"},
    "preferences": {"prompt": "q", "chosen": "a", "rejected": "b"},
}
BAD: dict[str, list[tuple[dict[str, Any], str]]] = {
    "conversations": [
        ({"messages": turns("a")}, "no turn .*: 'user'"),
        ({"messages": [{"role": "critic", "content": "b"}]}, "no turn .*'critic'"),
        (
            {"messages": [*turns("a", "b", "c"), {"role": "asistant", "content": "d"}]},
            r"message 3 of 'messages' has the role 'asistant'.*\s.*did you mean 'assistant'",
        ),
        (
            {"messages": [{"role": "gpt", "content": "b"}]},
            r"has the role 'gpt'.*\s.*mean 'assistant'",
        ),
        ({"messages": turns("b", first="assistant")}, "begins .*assistant"),
        ({"messages": turns("a", " ")}, "message 1 of 'messages' .*empty"),
        (
            {"messages": [*turns("a", "b", "c"), {"role": "tool", "content": "1"}]},
            "message 3 of 'messages' .*tool.* is 'user'",
        ),
        (
            {"messages": [{"role": "tool", "content": "1"}, *turns("a", "b")]},
            "message 0 of 'messages' .*tool.* is none",
        ),
        ({"messages": "text"}, "'messages' is 'text' .*list"),
        ({"messages": None}, "'messages' is null"),
        ({"messages": turns("a", "b"), "tools": "search"}, "'tools' is 'search' .*JSON schemas"),
        (
            {"messages": [turns("a")[0], {"role": "assistant", "content": "b", "weight": 0}]},
            "no turn .*weight .*0",
        ),
        (
            {"messages": [turns("a")[0], {"role": "assistant", "content": "b", "weight": 0.5}]},
            "message 1 of 'messages' .*weight 0.5",
        ),
        ({"messages": turns("a", "b"), "images": ["x.png"]}, r"0 images.* 1\b"),
        ({"messages": turns("a", "b"), "videos": ["x.mp4"]}, "the row has videos"),
    ],
    "responses": [
        ({"prompt": "a", "response": ""}, "'response' .*empty"),
        ({"prompt": "a", "response": None}, "'response' is null"),
        ({"prompt": None, "response": "b"}, "'prompt' is null"),
        ({"prompt": "a", "response": turns("b")}, "'response' .*no turn"),
    ],
    "preferences": [
        ({"prompt": "q", "chosen": "a"}, "'rejected' is null"),
        ({"prompt": "q", "chosen": None, "rejected": "b"}, "'chosen' is null"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "'chosen' and 'rejected' .*equal"),
        ({"chosen": turns("q", "a"), "rejected": turns("q", "a")}, "are equal"),
        (
            {"chosen": turns("q", "a"), "rejected": turns("p", "b")},
            "the prompts .* differ: message 0",
        ),
        (
            {"chosen": turns("q", "a", "r", "b"), "rejected": turns("q", "a", "s", "b")},
            "the prompts .* differ: message 2",
        ),
        (
            {"chosen": turns("q", "a", "r", "b"), "rejected": turns("q", "a")},
            "'rejected' has no answer",
        ),
        ({"chosen": "a", "rejected": "b"}, "no prompt"),
        (
            {"prompt": turns("q"), "chosen": turns("q", "a"), "rejected": turns("q", "b")},
            "'chosen' .*'user'",
        ),
        ({"prompt": "q", "chosen": turns("a", " ", first="assistant"), "rejected": " "}, "empty"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "row", "says"), [(kind, *each) for kind, rows in BAD.items() for each in rows]
)
def test_a_bad_row_is_refused_with_its_place(tokenizer, kind, row, says) -> None:
    examples = "preferences" if kind == "preferences" else "conversations"
    with pytest.raises(DataError, match=f"^row 1: .*{says}"):
        load(tokenizer, [GOOD[kind], row], examples)


@pytest.mark.parametrize(
    ("row", "kind", "lacks"),
    [
        ({"text": "a"}, "conversations", "messages"),
        ({"prompt": "a", "answer": "b"}, "conversations", "response"),
        ({"question": "a", "response": "b"}, "conversations", "prompt"),
        ({"prompt": "a", "chosen": "b"}, "preferences", "rejected"),
    ],
)
def test_a_missing_column_names_those_that_there_are(tokenizer, write, row, kind, lacks) -> None:
    path = write("x.jsonl", [row])
    source, model = files_source(), ModelSection(path="m")
    with pytest.raises(DataError, match=f"x.jsonl .*'{lacks}'") as caught:
        load_examples(source, [path], tokenizer, DataSection(), model, kind)
    assert f"its columns: {', '.join(row)}" in caught.value.message
    assert caught.value.hint


# The loader


def test_a_resume_on_other_answers_to_the_same_prompts_is_refused(tokenizer) -> None:
    def loader(answer: str) -> PromptLoader:
        examples = load(tokenizer, [{"prompt": "a", "response": answer}])
        return PromptLoader(examples, sequential(), 1, Ledger())

    state = loader("b").state()
    loader("b").load_state(state)
    with pytest.raises(DataError):
        loader("c").load_state(state)


def test_a_response_that_was_rated_alone_keeps_its_label(tokenizer) -> None:
    rows = [
        {"prompt": "1 + 1 =", "completion": "2", "label": True},
        {"prompt": "1 + 1 =", "completion": "3", "label": False},
    ]
    examples = load(tokenizer, rows, "unpaired_preferences")
    assert [example.labels for example in examples] == [{"desirable": True}, {"desirable": False}]
    assert [len(example.answers) for example in examples] == [1, 1]


def test_a_pair_keeps_its_margin(tokenizer) -> None:
    row = {"prompt": "1 + 1 =", "chosen": "2", "rejected": "3", "margin": 2}
    (example,) = load(tokenizer, [row], "preferences")
    assert example.labels == {"margin": 2.0}


@pytest.mark.parametrize(
    ("kind", "row", "says"),
    [
        ("unpaired_preferences", {"completion": "2", "label": 1}, "'label' is 1 (int)"),
        ("unpaired_preferences", {"completion": "2", "label": None}, "'label' is null or missing"),
        ("unpaired_preferences", {"completion": "2"}, "has no column 'label'"),
        ("unpaired_preferences", {"label": True}, "has no column 'response'"),
        (
            "preferences",
            {"chosen": "2", "rejected": "3", "margin": float("nan")},
            "expected a finite number",
        ),
        (
            "preferences",
            {"chosen": "2", "rejected": "3", "margin": None},
            "'margin' is null or missing",
        ),
    ],
)
def test_a_bad_label_is_refused_with_its_row(tokenizer, kind, row, says) -> None:
    with pytest.raises(DataError, match=re.escape(says)):
        load(tokenizer, [{"prompt": "1 + 1 =", **row}], kind)


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_token_without_an_embedding_is_refused_with_its_row(
    tokenizer, write, tmp_path: Path, name: str, streamed: bool
) -> None:
    (last,) = tokenizer("b", add_special_tokens=False)["input_ids"]
    rows = [{"prompt": "a", "response": text} for text in ("a", "b")]
    source, paths = files_source(), [write(name, rows)]
    section, model = DataSection(plain_prompts="raw"), ModelSection(path=str(tmp_path))

    def load_them() -> int:
        if streamed:
            whole = attrs.evolve(section, streaming=True)
            datasets = {"": (paths, section)}
            found = load_datasets(source, datasets, tokenizer, whole, model, "conversations")
            return len(found.prompts)
        return len(load_examples(source, paths, tokenizer, section, model, "conversations"))

    config = {"model_type": "qwen2", "vocab_size": len(tokenizer)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_them() == 2
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": last}))
    with pytest.raises(DataError, match=rf"{name}, (line 2|row 1): .*'b'.*{last}"):
        load_them()
