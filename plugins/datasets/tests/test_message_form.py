"""The form of messages that a chat template takes: text or parts, arguments as mapping or JSON, and the field of thoughts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dataset_rows import say

from dovetail.errors import DataError
from dovetail_rollouts import TurnEncoder
from dovetail_sdk.testing import template_tokenizer

CHAT = (
    "{% for m in messages %}<|start|>{{ m.role }}:CONTENT{% for c in m.tool_calls or [] %}CALL{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
TEXTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
CONTENTS = {
    "text alone": "{{ m.content + '' }}",
    "text alone, parts dropped": "{% if m.content is string %}{{ m.content }}{% endif %}",
    "text alone, parts as Python writes them": "{{ m.content }}",
    "text alone, parts as JSON": "{{ m.content if m.content is string else m.content | tojson }}",
    "parts alone, text dropped": TEXTS,
    "parts alone, text refused": "{% for p in m.content %}{{ p['text'] + '' }}{% endfor %}",
    "either": "{% if m.content is string %}{{ m.content }}{% else %}" + TEXTS + "{% endif %}",
}
NAME = "{{ c.function.name }}"
CALLS = {
    "tojson": NAME + "{{ c.function.arguments | tojson }}",
    "items": NAME
    + "{% for k, v in c.function.arguments.items() %}[{{ k }}={{ v | tojson }}]{% endfor %}",
    "text": NAME + "{{ '' + c.function.arguments }}",
    "either": NAME + "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}",
    "as Python writes it": NAME + "{{ c.function.arguments }}",
}


def chat(content: str = "{{ m.content or '' }}", call: str = CALLS["tojson"]) -> str:
    return CHAT.replace("CONTENT", content).replace("CALL", call)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def called(arguments: Any, name: str = "weather") -> dict[str, Any]:
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return say("assistant", "", tool_calls=[call])


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("given", ["text", "parts"])
def test_text_and_parts_reach_every_template_in_rows_prompts_pairs_and_turns(
    read, content: str, given: str
) -> None:
    def write(role: str, text: str) -> dict[str, Any]:
        return say(role, text if given == "text" else parts(text[:2], text[2:]))

    template, system, asks = chat(content), write("system", "be brief"), write("user", "two?")
    opened = "<|start|>system:be brief<|end|><|start|>user:two?<|end|><|start|>assistant:"
    rows = read(template, [{"messages": [system, asks, write("assistant", "dos")]}])
    assert (rows.prompts, rows.trained) == ([opened], ["dos<|end|>"])
    assert read(template, [{"prompt": [system, asks]}], "prompts", file="p.jsonl").prompts == [
        opened
    ]
    pair = {
        "prompt": [system, asks],
        "chosen": [write("assistant", "dos")],
        "rejected": [write("assistant", "tres")],
    }
    assert read(template, [pair], "preferences").trained == ["dos<|end|>", "tres<|end|>"]
    encoder = TurnEncoder(template_tokenizer(template))
    assert encoder.render([system, asks], generate=True) == opened
    shown = encoder.decode(encoder.after([asks], [write("user", "three?")], ended_by=None))
    assert shown == "<|end|><|start|>user:three?<|end|><|start|>assistant:"


ARGUMENTS = [
    {"city": "Rome"},
    {"city": "Zürich", "note": 'say "hi"\n'},
    {"where": {"city": "Rome", "near": [1, None, {"x": None}]}, "days": 2.0},
    {"city": None},
    {},
]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_arguments_by_name_and_as_json_are_the_same_text(read, call: str, arguments: Any) -> None:
    template = chat(call=call)
    asks = say("user", "how is it?")
    texts = set()
    for given in (arguments, json.dumps(arguments, ensure_ascii=False)):
        turns = [asks, called(given), say("tool", "fine"), say("assistant", "good")]
        rows = read(template, [{"messages": turns}])
        pair = {"prompt": [asks], "chosen": [called(given)], "rejected": [say("assistant", "no")]}
        encoder = TurnEncoder(template_tokenizer(template))
        texts |= {
            rows.trained[0].partition("…")[0],
            read(template, [{"prompt": turns[:3]}], "prompts")
            .prompts[0]
            .split("<|start|>assistant:")[1]
            .partition("<|start|>")[0],
            read(template, [pair], "preferences").trained[0],
            encoder.render([asks, called(given)], generate=False).rpartition("assistant:")[2],
        }
        assert not rows.left_out
    (text,) = texts
    assert text.startswith("weather")
    if call != CALLS["items"]:
        assert json.loads(text.removeprefix("weather").removesuffix("<|end|>")) == arguments


@pytest.mark.parametrize("nothing", [None, "", "{}"])
def test_a_call_without_arguments_has_none(read, nothing: Any) -> None:
    rows = read(chat(), [{"messages": [say("user", "q"), called(nothing)]}])
    assert rows.trained == ["weather{}<|end|>"]


@pytest.mark.parametrize("wrong", ["city=Rome", '["Rome"]', "null", '{"city": "Ro'])
def test_arguments_that_are_no_json_object_are_refused_where_the_template_would_quote_them(
    read, wrong: str
) -> None:
    row = {"messages": [say("user", "q"), called(wrong)]}
    for kind, rows in (
        ("conversations", [row]),
        ("prompts", [{"prompt": [*row["messages"], say("user", "and?")]}]),
    ):
        with pytest.raises(
            DataError, match=r"rows.jsonl, line 1: .*'weather'.*expected a JSON object"
        ):
            read(chat(call=CALLS["tojson"]), rows, kind)
    for call in ("text", "either"):
        assert read(chat(call=CALLS[call]), [row]).trained == [f"weather{wrong}<|end|>"]


@pytest.mark.parametrize(
    "calls",
    [
        "call me",
        3,
        {"name": "weather"},
        [None],
        ["weather"],
        [{"function": "weather"}],
        [{"function": {"name": 3}}],
        [{"function": {"name": "weather", "arguments": [["city", "Rome"]]}}],
    ],
)
def test_calls_in_no_known_form_are_refused_with_their_row(read, calls: Any) -> None:
    with pytest.raises(
        DataError, match=r"rows.jsonl, line 1: message 1 of 'messages' .*tool_calls"
    ):
        read(chat(), [{"messages": [say("user", "q"), say("assistant", "a", tool_calls=calls)]}])


def test_calls_may_be_json_text_and_none_may_be_an_empty_list(read) -> None:
    turn = called({"city": "Rome"})
    text = {**turn, "tool_calls": json.dumps(turn["tool_calls"])}
    asks = say("user", "q")
    rows = [{"messages": [asks, each]} for each in (turn, text)]
    assert len(set(read(chat(), rows).trained)) == 1
    # Like DeepSeek's template, which writes the content only if the key `tool_calls` is absent.
    template = CHAT.replace("CONTENT", "{% if 'tool_calls' not in m %}{{ m.content }}{% endif %}")
    rows = [{"messages": [asks, say("assistant", "fine", tool_calls=none)]} for none in ([], None)]
    assert read(template.replace("CALL", "x"), rows).trained == ["fine<|end|>"] * 2


@pytest.mark.parametrize("content", ["", None])
def test_calls_are_written_by_a_template_that_asks_for_no_content(read, content: Any) -> None:
    call = "{% if m.content is none %}" + CALLS["text"] + "{% endif %}"
    template = chat("{{ m.content if m.content is not none }}", call)
    row = {"messages": [say("user", "q"), {**called({"city": "Rome"}), "content": content}]}
    assert read(template, [row]).trained == ['weather{"city": "Rome"}<|end|>']


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read_as", ["reasoning_content", "thinking"])
def test_a_thought_is_written_whatever_its_field_is_called(read, field: str, read_as: str) -> None:
    template = chat("{% if m." + read_as + " %}({{ m." + read_as + " }}){% endif %}{{ m.content }}")
    turn = say("assistant", "four", **{field: "two and two"})
    assert read(template, [{"messages": [say("user", "q"), turn]}]).trained == [
        "(two and two)four<|end|>"
    ]
    encoder = TurnEncoder(template_tokenizer(template))
    produced = encoder.produced_turn({"content": "four", "reasoning_content": "two and two"})
    assert "(two and two)four" in encoder.render([say("user", "q"), produced], generate=False)


def test_a_template_that_reads_several_fields_of_thoughts_gets_them_as_they_are(read) -> None:
    template = chat("{{ m.reasoning or '' }}{{ m.reasoning_content or '' }}{{ m.content }}")
    turn = say("assistant", "four", reasoning="hm", reasoning_content="ha")
    assert read(template, [{"messages": [say("user", "q"), turn]}]).trained == ["hmhafour<|end|>"]


def test_the_template_for_tools_may_take_another_form_than_that_without(read) -> None:
    tokenizer = template_tokenizer(chat())
    tokenizer.chat_template = {
        "default": chat(),
        "tool_use": "{{ tools | tojson }}" + chat(call=CALLS["text"]),
    }
    tool = {"type": "function", "function": {"name": "weather"}}
    for tools, written in (((), 'weather{"city": "Rome"}'), ((tool,), 'weather{"city": "Rome"}')):
        text = TurnEncoder(tokenizer, tools).render(
            [say("user", "q"), called({"city": "Rome"})], generate=False
        )
        assert written in text
