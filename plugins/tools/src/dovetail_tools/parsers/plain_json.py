"""Calls that are JSON objects in the text, without tags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.interfaces import ParsedTurn, ToolParser, ToolSchema
from dovetail_tools.parsers.turn import TurnParts, json_at

_BEGIN = re.compile(r"(?:\[\s*)?\{\s*\"")
"""Pattern of the beginning of an object, or of an array of objects."""
_CALL = re.compile(_BEGIN.pattern + r"(?:name|type|function|arguments|parameters)\"")
_NO_CONTENT = re.compile(r"```(?:json)?\s*```|<\|python_tag\|>")
"""Pattern of the text around calls that is not content: an emptied fenced block, or a tag."""
_SEPARATORS = ("", ";", ",")


class PlainJson(ToolParser):
    """Parses calls `{"name": …, "arguments": {…}}` (or `parameters`), one after another or in an array, also in a fenced block."""

    name = "json"
    api = ">=1.0,<2"

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
        turn = TurnParts(text, call="{")
        rest, position, text_from = turn.rest, 0, 0
        content: list[str] = []
        while (begin := _BEGIN.search(rest, position)) is not None:
            start = begin.start()
            try:
                value, end = json_at(rest, start)
            except ValueError as error:
                if _CALL.match(rest, start):
                    turn.error(f"a tool call is not a JSON object: {error}")
                    content.append(rest[text_from:start])
                    text_from = len(rest)
                break  # an object inside an unreadable object is not a call
            position = end
            calls = [_unwrapped(one) for one in (value if isinstance(value, list) else [value])]
            if calls and all(map(_is_call, calls)):
                content.append(rest[text_from:start])
                text_from = end
                for call in calls:
                    turn.call_object(call)
        content.append(rest[text_from:])
        kept = [piece for piece in content if piece.strip() not in _SEPARATORS]
        turn.text(_NO_CONTENT.sub("", "".join(kept)))
        return turn.finish()


class Llama3Json(PlainJson):
    """Parses `<|python_tag|>{"name": …, "parameters": {…}}`, several calls separated by `;`: Llama 3.1 to 3.3."""

    name = "llama3_json"
    aliases = ("llama3",)
    api = ">=1.0,<2"
    served_as: ClassVar[Mapping[str, str]] = {"vllm": "llama3_json", "sglang": "llama3"}


def _unwrapped(value: Any) -> Any:
    """Return the `function` of a call in the format of OpenAI's API; other values unchanged."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        return value["function"]
    return value


def _is_call(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and "name" in value
        and ("arguments" in value or "parameters" in value)
    )
