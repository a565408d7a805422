"""Parsers read the calls of generated turns; and turns with faults."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from dovetail.interfaces import PluginContext
from dovetail.plugins import load_plugin_class, ref_for
from dovetail.sections import PluginSection

TEXT = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="<>[]{}｜|"), max_size=8
)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
CALLS = st.lists(
    st.tuples(st.sampled_from(("f", "get_time")), st.dictionaries(st.sampled_from("abc"), VALUE)),
    min_size=1,
    max_size=4,
)
TYPES = ["null", "boolean", "integer", "number", "array", "object", "string"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": TYPES} for key in "abc"}},
        },
    }
    for name in ("f", "get_time")
]


def _objects(calls: Any) -> list[str]:
    return [json.dumps({"name": name, "arguments": given}) for name, given in calls]


WRITTEN = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in _objects(calls)),
    "llama3_json": lambda calls: "<|python_tag|>" + "; ".join(_objects(calls)) + "<|eom_id|>",
    "json": lambda calls: f"```json\n[{','.join(_objects(calls))}]\n```",
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls) + "</s>",
    "deepseek_v3": lambda calls: "<｜tool▁calls▁begin｜>"
    + "".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a, indent=1)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    )
    + "<｜tool▁calls▁end｜>",
    "harmony": lambda calls: "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{json.dumps(a)}<|call|>"
        for n, a in calls
    ),
}  # fmt: skip


def parser(name: str) -> Any:
    cls = load_plugin_class(ref_for("tool_parser", PluginSection(name=name)))
    return cls(cls.Config(name=name), PluginContext())


TAGGED = {
    "qwen3_coder": (
        "<tool_call>\n<function={}>\n{}</function>\n</tool_call>",
        "<parameter={}>\n{}\n</parameter>\n",
    ),
    "xml": (
        '<tool_calls><invoke name="{}">{}</invoke></tool_calls>',
        '<parameter name="{}">{}</parameter>',
    ),
}
"""Formats of a call and of a parameter, by parser."""


def in_tags(name: str, calls: Any) -> str:
    call, parameter = TAGGED[name]
    return "\n".join(
        call.format(function, "".join(parameter.format(*one) for one in given.items()))
        for function, given in calls
    )


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_that_were_written_are_read(name):
    read = parser(name)

    @settings(max_examples=30)
    @given(calls=CALLS)
    def reads(calls):
        turn = read.parse(WRITTEN[name](calls), TOOLS)
        assert [(call.name, call.arguments) for call in turn.calls] == calls
        assert (turn.content, turn.errors) == ("", ())

    reads()


@pytest.mark.parametrize("name", TAGGED)
def test_parameters_in_tags_get_the_types_of_the_schema(name):
    read = parser(name)
    values: dict[str, st.SearchStrategy[Any]] = {
        "string": TEXT.map(lambda text: f"x{text}x"),
        "integer": st.integers(),
        "number": st.floats(allow_nan=False, allow_infinity=False),
        "boolean": st.booleans(),
        "array": st.lists(VALUE, max_size=3),
        "object": st.dictionaries(TEXT, VALUE, max_size=3),
    }

    @settings(max_examples=30)
    @given(given=st.fixed_dictionaries({}, optional=values))
    def reads(given):
        properties = {key: {"type": key} for key in values}
        tool = {"function": {"name": "f", "parameters": {"properties": properties}}}
        written = {k: v if isinstance(v, str) else json.dumps(v) for k, v in given.items()}
        turn = read.parse(in_tags(name, [("f", written)]), [tool])
        assert [call.arguments for call in turn.calls] == [given]
        assert (turn.content, turn.errors) == ("", ())

    reads()


PIECES = (
    *("<tool_call>", "</tool_call>", '{"name": "g", "arguments": {}}', "[TOOL_CALLS]g[ARGS]{}"),
    *("<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```json\n{}\n```"),
    "<|call|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{}<|call|>",
    *("<parameter>x</parameter>", "</parameter>", "<parameter=a>", '<parameter name="a">', "</invoke>", "</function>"),
    *("<function=g><parameter=a>1</parameter></function>", "</parameter></function>", "</parameter></invoke>"),
    *('<invoke name="g"><parameter name="a">1</parameter></invoke>', "<think>", "</think>", "}}", "{{", '"', "\\", "x"),
)  # fmt: skip


@pytest.mark.parametrize("name", [*WRITTEN, *TAGGED])
def test_values_that_hold_tags_are_read_whole_or_are_an_error(name):
    read = parser(name)
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]

    @given(pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=4))
    def reads(pieces):
        calls = [("f", {"a": f"<{' '.join(pieces)}>"}), ("f", {"a": "2"})]
        turn = read.parse(in_tags(name, calls) if name in TAGGED else WRITTEN[name](calls), tools)
        found = [(call.name, call.arguments) for call in turn.calls]
        assert found == calls or (name in TAGGED and turn.errors and all(c in calls for c in found))

    reads()


@pytest.mark.parametrize("name", TAGGED)
def test_a_value_holds_closing_tags_and_parameters_that_are_complete(name):
    call, parameter = TAGGED[name]
    inner = parameter.format("b", "1")
    for value in (f"<form>{inner}</form>", "<p><parameter>x</parameter></p>", call.format("g", inner)):  # fmt: skip
        turn = parser(name).parse(in_tags(name, [("f", {"a": value, "b": "2"})]), TOOLS)
        assert [call.arguments for call in turn.calls] == [{"a": value, "b": 2}]


@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "'f' are null"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "'}</tool_call>' follows"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "JSON object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogate"),
        ("hermes", f"<tool_call>{'[' * 100_000}", "nested too deeply"),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 200}{"]" * 200}}}}}</tool_call>', "100 levels"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "not finite"),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>', "digits"),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "expected a function's name"),
        ("hermes", "<tool_call>[1]</tool_call>", "[1]; expected an object"),
        ("json", '{"name": "f", "arguments": {"a"', "not a JSON object"),
        ("mistral", "[TOOL_CALLS]weather", "has no arguments"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "cut off"),
        ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json", "'f' was cut off"),
        ("harmony", "commentary to=functions.f<|message|>{}", "no <|channel|>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{", "arguments of 'f'"),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter>", "has no </function>"),
        ("qwen3_coder", "<function=f><parameter=a>1</param></function>", "'a' has no </parameter>"),
        ("qwen3_coder", "<function=f><parameter=a>1<parameter=b>2</parameter></function>", "'a' has no </parameter>"),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", "'a' is given twice"),
        ("qwen3_coder", "<function=f><parameter=a>x</parameter></function>y</parameter></function>", "ends the call"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}x<｜tool▁call▁end｜>", "'x' follows"),
        ("qwen3_coder", "<function=\nf><parameter=>1</parameter></function>", "'f' can't be read:"),
        ("xml", '<invoke name="f', "no function's name"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_read_is_an_error_and_no_call(name, text, facts):
    turn = parser(name).parse(text, TOOLS)
    assert turn.calls == ()
    [error] = turn.errors
    assert facts in error
    assert len(error) < 400


def test_calls_beside_one_that_cannot_be_read_are_kept():
    turn = parser("hermes").parse(
        '<tool_call>{bad}</tool_call>so<tool_call>{"name": "f", "arguments": {}}</tool_call>', TOOLS
    )
    assert [call.name for call in turn.calls] == ["f"]
    assert len(turn.errors) == 1
    assert turn.content == "so"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>a</think>b", "a", "b"),
        ("a</think>b", "a", "b"),
        ("<think>a <tool_call>x</tool_call>", "a <tool_call>x</tool_call>", ""),
        ("<think></think>b", None, "b"),
        ("b", None, "b"),
    ],
)
def test_reasoning_is_apart_also_where_the_template_or_the_limit_took_a_tag(text, reasoning, content):  # fmt: skip
    turn = parser("hermes").parse(text, TOOLS)
    assert (turn.reasoning, turn.content, turn.calls) == (reasoning, content, ())


LONG = (
    "[",
    "{",
    " ",
    "\n",
    "<",
    "[{",
    '{"a":',
    '["x",',
    "<function=",
    "<invoke ",
    "<tool_call>",
    "[TOOL_CALLS]x ",
    "<|start|>",
)
LONG += (
    "<｜tool▁call▁begin｜>",
    "<|channel|>",
    "<|message|>",
    "[TOOL_CALLS]x" + " " * 5000,
    "<tool_call>{",
    "</think>",
    "<function=f><parameter=a></function>",
    "<function=f><parameter=a>x</parameter>y</function>",
)


@pytest.mark.parametrize("name", [*WRITTEN, *TAGGED])
def test_what_repeats_for_long_is_read_in_little_time(name):
    read = parser(name)
    for piece in LONG:
        text = piece * (100_000 // len(piece))
        began = time.process_time()
        assert read.parse(f"a{text}", TOOLS).calls == ()
        assert time.process_time() - began < 2, piece
