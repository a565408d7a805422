"""A small parser and small tools, which tests select by this file's path."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.errors import ToolError
from dovetail.interfaces import (
    EpisodeInfo,
    ParsedTurn,
    Tool,
    ToolCall,
    ToolParser,
    ToolResult,
    ToolSchema,
)

_CALL = re.compile(r"<call>(.*?)</call>", re.DOTALL)


class Calls(ToolParser):
    """A parser of `<call>{"name": …, "arguments": …}</call>`."""

    name = "calls"
    api = ">=1.0,<2"

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
        calls, errors = [], []
        for number, found in enumerate(_CALL.findall(text)):
            try:
                call = json.loads(found)
                calls.append(
                    ToolCall(id=f"call_{number}", name=call["name"], arguments=call["arguments"])
                )
            except (ValueError, KeyError, TypeError):
                errors.append(f"{found!r} is not a call")
        return ParsedTurn(content=_CALL.sub("", text), calls=tuple(calls), errors=tuple(errors))


def _schema(name: str, **parameters: str) -> ToolSchema:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        },
    }


class Arithmetic(Tool):
    """A tool that adds and divides, and counts an episode's calls."""

    name = "arithmetic"
    api = ">=2.0,<3"

    def schemas(self) -> Sequence[ToolSchema]:
        return [_schema("add", a="number", b="number"), _schema("divide", a="number", b="number")]

    async def open(self, episode: EpisodeInfo) -> dict[str, int]:
        return {"calls": 0}

    async def call(self, state: Any, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        state["calls"] += 1
        a, b = arguments["a"], arguments["b"]
        if name == "divide" and not b:
            raise ToolError("division by zero")
        value = a + b if name == "add" else a / b
        return ToolResult(content=f"{value:g} (call {state['calls']})", reward=0.25)


class Troubles(Tool):
    """A tool whose functions hang, fail, fail at first, give long results, or end the episode."""

    name = "troubles"
    api = ">=2.0,<3"

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self.hanging = 0
        self.tries = 0

    def schemas(self) -> Sequence[ToolSchema]:
        names = (
            "hang",
            "late",
            "late_refusal",
            "break",
            "break_at_first",
            "leave",
            "talk",
            "finish",
            "nothing",
        )
        return [_schema(name) for name in names]

    async def call(self, state: Any, name: str, arguments: Mapping[str, Any]) -> Any:
        match name:
            case "hang":
                self.hanging += 1
                try:
                    await asyncio.sleep(60)
                finally:
                    self.hanging -= 1
            case "late" | "late_refusal":
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
                if name == "late_refusal":
                    raise ToolError("too late")
            case "break" | "leave":
                raise SystemExit(3) if name == "leave" else ConnectionError("the index is down")
            case "break_at_first":
                self.tries += 1
                if self.tries == 1:
                    raise ConnectionError("the index is down")
            case "talk":
                return ToolResult(content="word " * 1_000_000)
            case "finish":
                return ToolResult(content="over", reward=1.0, done=True)
            case "nothing":
                return None
        return ToolResult(content="well")
