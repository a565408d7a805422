"""Hermes: calls are JSON between tags, also in Qwen2.5, Qwen3 and many other models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from dovetail.interfaces import ParsedTurn, ToolParser, ToolSchema
from dovetail_tools.parsers.turn import TurnParts, json_at

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_END = re.compile(rf"\s*(?:{CLOSE}|\Z)")


class Hermes(ToolParser):
    """Parses `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once per call; reasoning is in `<think>`."""

    name = "hermes"
    aliases = ("qwen", "qwen25", "qwen3")
    api = ">=1.0,<2"
    served_as: ClassVar[Mapping[str, str]] = {"vllm": "hermes", "sglang": "hermes"}
    reasoning_as: ClassVar[Mapping[str, str]] = {"vllm": "qwen3", "sglang": "qwen3"}

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
        turn = TurnParts(text, call=OPEN)
        rest, position = turn.rest, 0
        while (start := rest.find(OPEN, position)) >= 0:
            turn.text(rest[position:start])
            body = start + len(OPEN)
            try:
                value, end = json_at(rest, body)
                closing = _END.match(rest, end)
                problem = f"{rest[end:].strip()[:40]!r} follows the JSON value"
            except ValueError as error:
                closing, problem = None, str(error)
            if closing is not None:
                turn.call_object(value)
                position = closing.end()
            else:
                turn.error(f"the text between {OPEN} and {CLOSE} is not a JSON object: {problem}")
                end = rest.find(CLOSE, body)
                position = len(rest) if end < 0 else end + len(CLOSE)
        turn.text(rest[position:])
        return turn.finish()
