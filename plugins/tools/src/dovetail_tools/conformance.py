"""The conformance suites of this package's plugins, which `dovetail plugins check` runs."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces import ParsedTurn, ToolCall
from dovetail_sdk.testing.conformance import ToolConformance, ToolParserConformance
from dovetail_tools.calculator import Calculator
from dovetail_tools.parsers.deepseek import DeepSeekV3
from dovetail_tools.parsers.harmony import Harmony
from dovetail_tools.parsers.hermes import Hermes
from dovetail_tools.parsers.mistral import Mistral
from dovetail_tools.parsers.plain_json import Llama3Json, PlainJson
from dovetail_tools.parsers.tagged import Qwen3Coder, Xml

_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "hourly": {"type": ["boolean", "null"]},
                "where": {"anyOf": [{"type": "object"}, {"type": "array"}]},
            },
            "required": ["city"],
        },
    },
}


def _calls(*arguments: dict[str, Any]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(id=f"call_{i}", name="weather", arguments=one) for i, one in enumerate(arguments)
    )


class TestCalculator(ToolConformance):
    """Conformance suite of the tool `calculator`."""

    plugin = Calculator
    calls = (
        ("calculator", {"expression": "(3 + 4.5) * 2**10 / sqrt(16)"}, "1920.0"),
        ("calculator", {"expression": "-7 // 2 + max(1, 2, 3) % 2"}, "-3"),
        ("calculator", {"expression": "2**100 + 1"}, "1267650600228229401496703205377"),
    )
    refused = (
        ("calculator", {"expression": "1 / 0"}, "division by zero"),
        ("calculator", {"expression": "9**9**9**9"}, "too large"),
        ("calculator", {"expression": "__import__('os')"}, "not arithmetic"),
        ("calculator", {"expression": "(1).__class__"}, "not arithmetic"),
        ("calculator", {"expression": "2 +"}, "no value"),
        ("calculator", {"expression": "(" * 900}, "no value"),
        ("calculator", {"expression": "sqrt(-1)"}, "no value"),
        ("calculator", {"expression": "(-8) ** 0.5"}, "not a real number"),
        ("calculator", {"expression": "1e999"}, "inf"),
        ("calculator", {"expression": "1" * 2000}, "2000 characters"),
        ("calculator", {"expression": "True + 1"}, "not arithmetic"),
    )


class TestHermes(ToolParserConformance):
    """Conformance suite of the tool parser `hermes`: JSON between tags."""

    plugin = Hermes
    examples = (
        (
            (
                "<think>\nTwo cities.\n</think>\n\nLet me see.\n<tool_call>\n"
                '{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n<tool_call>\n'
                '{"name": "weather", "arguments": {"city": "</tool_call>", "days": 2}}\n</tool_call><|im_end|>'
            ),
            ParsedTurn(
                content="Let me see.",
                reasoning="Two cities.",
                calls=_calls({"city": "Köln"}, {"city": "</tool_call>", "days": 2}),
            ),
        ),
    )


class TestQwen3Coder(ToolParserConformance):
    """Conformance suite of the tool parser `qwen3_coder`: parameters in tags, with types from the tool's schema."""

    plugin = Qwen3Coder
    tools = (_WEATHER,)
    examples = (
        (
            (
                "So be it.</think>I look.\n<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n"
                "<parameter=days>\n3\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n"
                '<parameter=where>\n{"a": [1.5, null]}\n</parameter>\n</function>\n</tool_call>'
            ),
            ParsedTurn(
                content="I look.",
                reasoning="So be it.",
                calls=_calls(
                    {"city": "12", "days": 3, "hourly": True, "where": {"a": [1.5, None]}}
                ),
            ),
        ),
    )


class TestXml(ToolParserConformance):
    """Conformance suite of the tool parser `xml`: tags with attributes."""

    plugin = Xml
    tools = (_WEATHER,)
    examples = (
        (
            (
                'I look.\n<function_calls><invoke name="weather"><parameter name="city">a\nb</parameter>'
                '<parameter name="days">3</parameter></invoke>\n<invoke name="weather">'
                '<parameter name="hourly">null</parameter></invoke></function_calls>'
            ),
            ParsedTurn(
                content="I look.", calls=_calls({"city": "a\nb", "days": 3}, {"hourly": None})
            ),
        ),
    )


class TestLlama3Json(ToolParserConformance):
    """Conformance suite of the tool parser `llama3_json`: JSON after a tag."""

    plugin = Llama3Json
    examples = (
        (
            (
                '<|python_tag|>{"name": "weather", "parameters": {"city": "{"}}; '
                '{"name": "weather", "parameters": {"where": {"name": "f", "parameters": {}}}}<|eom_id|>'
            ),
            ParsedTurn(
                content="",
                calls=_calls({"city": "{"}, {"where": {"name": "f", "parameters": {}}}),
            ),
        ),
    )


class TestPlainJson(ToolParserConformance):
    """Conformance suite of the tool parser `json`: JSON calls within text, without tags."""

    plugin = PlainJson
    examples = (
        (
            (
                'Like {this}:\n```json\n[{"name": "weather", "arguments": {"city": "x"}}, '
                '{"type": "function", "function": {"name": "weather", "arguments": {}}}]\n```'
            ),
            ParsedTurn(content="Like {this}:", calls=_calls({"city": "x"}, {})),
        ),
    )


class TestMistral(ToolParserConformance):
    """Conformance suite of the tool parser `mistral`: calls in the forms before and since tokenizer v11."""

    plugin = Mistral
    examples = (
        (
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "a]b"}}, {"name": "weather", "arguments": {}}]</s>',
            ParsedTurn(content="", calls=_calls({"city": "a]b"}, {})),
        ),
        (
            'I look.[TOOL_CALLS]weather[ARGS]{"city": "a"}[TOOL_CALLS]weather{"days": 1}</s>',
            ParsedTurn(content="I look.", calls=_calls({"city": "a"}, {"days": 1})),
        ),
    )


class TestDeepSeekV3(ToolParserConformance):
    """Conformance suite of the tool parser `deepseek_v3`: calls in the forms of V3 and V3.1."""

    plugin = DeepSeekV3
    examples = (
        (
            (
                "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
                '{"city": "a",\n"days": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
            ),
            ParsedTurn(content="I look.", calls=_calls({"city": "a", "days": 1})),
        ),
        (
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
                '{"city": "a"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
            ),
            ParsedTurn(content="", calls=_calls({"city": "a"}, {})),
        ),
    )


class TestHarmony(ToolParserConformance):
    """Conformance suite of the tool parser `harmony`: messages in Harmony's channels."""

    plugin = Harmony
    examples = (
        (
            (
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
                "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
                '{"city": "a"}<|call|>'
            ),
            ParsedTurn(content="I look.", reasoning="Hm.", calls=_calls({"city": "a"})),
        ),
        (
            ' to=functions.weather<|channel|>commentary json<|message|>{"days": 2}',
            ParsedTurn(content="", calls=_calls({"days": 2})),
        ),
    )
