"""Calls whose parameters are tags; the schema of the function gives their types."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.interfaces import ParsedTurn, ToolParser, ToolSchema
from dovetail_tools.parsers.turn import TurnParts, whole_json

PARAMETER_END = "</parameter>"
_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


class Tagged(ToolParser):
    """Base of parsers for calls whose function and parameters are written as tags."""

    call: ClassVar[str]
    """The text that begins a function's tag."""
    function: ClassVar[re.Pattern[str]]
    """Pattern of a function's opening tag; the group `name` is the function's name."""
    function_end: ClassVar[str]
    parameter: ClassVar[re.Pattern[str]]
    """Pattern of a parameter's opening tag; the group `name` is the parameter's name."""
    around: ClassVar[re.Pattern[str]]
    """Pattern of the tags that enclose calls; they are removed from the message's content."""

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
        turn = TurnParts(text, call=self.call)
        rest, position = turn.rest, 0
        while (found := self.function.search(rest, position)) is not None:
            turn.text(self.around.sub("", rest[position : found.start()]))
            name = found["name"].strip()
            try:
                properties = _properties(tools, name)
                arguments, position = self._arguments(rest, found.end(), properties)
            except ValueError as error:
                # A further call in the text may be part of an unreadable value, so nothing after the error is read.
                further = self.function.search(rest, found.end()) is not None
                skipped = "; what follows it was not read" if further else ""
                turn.error(f"the call of {name!r} can't be read: {error}{skipped}")
                return turn.finish()
            turn.call(name, arguments)
        tail = rest[position:]
        if (cut := tail.rfind(self.call)) >= 0 and ">" not in tail[cut:]:
            turn.error(f"a call has no function's name: {tail[cut : cut + 80]!r}")
            tail = tail[:cut]
        turn.text(self.around.sub("", tail))
        return turn.finish()

    def _arguments(
        self, text: str, position: int, properties: Mapping[str, Any]
    ) -> tuple[dict[str, Any], int]:
        """Read the parameters after a function's tag; return the arguments and the offset after the call.

        Args:
            text: the text with the call.
            position: the offset after the function's tag.
            properties: the schemas of the function's parameters, by name.

        Raises:
            ValueError: a parameter has no name, is not closed or is repeated; or the function's tag is not closed, or closed twice.
        """
        if text.find(self.function_end, position) < 0:
            raise ValueError(f"the call has no {self.function_end}")
        following = re.compile(rf"\s*(?:{self.parameter.pattern}|{self.function_end})")
        arguments: dict[str, Any] = {}
        tag = following.search(text, position)
        while tag is not None and tag["name"] is not None:
            name = tag["name"].strip()
            if not name:
                raise ValueError("a parameter has no name")
            if name in arguments:
                raise ValueError(f"parameter {name!r} is given twice")
            end = self._value_end(text, tag.end(), following)
            if end is None:
                raise ValueError(f"parameter {name!r} has no {PARAMETER_END}")
            value = text[tag.end() : end.start()].removeprefix("\n").removesuffix("\n")
            arguments[name] = _typed(value, properties.get(name))
            tag = following.match(text, end.end())
        assert tag is not None
        after = self.function.search(text, tag.end())
        rest = text[tag.end() : None if after is None else after.start()]
        if PARAMETER_END in rest or self.function_end in rest:
            raise ValueError(
                f"a parameter's value contains {self.function_end}, which ends the call"
            )
        return arguments, tag.end()

    def _value_end(self, text: str, start: int, following: re.Pattern[str]) -> re.Match[str] | None:
        """Return the closing tag of a parameter's value that begins at `start`; None if there is none.

        Complete parameters inside the value are skipped. A closing tag counts only if `following` matches right after it.
        """
        depth = 0
        for tag in re.compile(f"{self.parameter.pattern}|{PARAMETER_END}").finditer(text, start):
            if tag["name"] is not None:
                depth += 1
            elif depth:
                depth -= 1
            elif following.match(text, tag.end()):
                return tag
        return None


class Qwen3Coder(Tagged):
    """Parses `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5."""

    name = "qwen3_coder"
    aliases = ("qwen3_xml",)
    api = ">=1.0,<2"
    served_as: ClassVar[Mapping[str, str]] = {"vllm": "qwen3_coder", "sglang": "qwen3_coder"}
    reasoning_as: ClassVar[Mapping[str, str]] = {"vllm": "qwen3", "sglang": "qwen3"}
    call = "<function="
    function = re.compile(r"<function=(?P<name>[^>]{0,200})>")
    function_end = "</function>"
    parameter = re.compile(r"<parameter=(?P<name>[^<>\n]{0,200})>")
    around = re.compile(r"</?tool_call>")


class Xml(Tagged):
    """Parses `<invoke name="f"><parameter name="x">1</parameter></invoke>`, in tags whose name ends in `tool_call` or `function_calls`."""

    name = "xml"
    aliases = ("minimax_m2",)
    api = ">=1.0,<2"
    served_as: ClassVar[Mapping[str, str]] = {"vllm": "minimax_m2", "sglang": "minimax-m2"}
    reasoning_as: ClassVar[Mapping[str, str]] = {"vllm": "minimax_m2", "sglang": "minimax"}
    call = "<invoke"
    function = re.compile(r"<invoke\s{1,9}name=[\"']?(?P<name>[^\"'>]{0,200})[\"']?\s{0,9}>")
    function_end = "</invoke>"
    parameter = re.compile(
        r"<parameter\s{1,9}name=[\"']?(?P<name>[^\"'>]{0,200})[\"']?[^>]{0,200}>"
    )
    around = re.compile(r"</?[\w:]*(?:tool_calls?|function_calls)>")


def _properties(tools: Sequence[ToolSchema], name: str) -> Mapping[str, Any]:
    """Return the schemas of a function's parameters, by name; empty if the function is unknown."""
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}


def _typed(text: str, schema: Any) -> Any:
    """Return a parameter's value: its text parsed as JSON, or the text itself if it is not JSON or the schema takes it as a string."""
    types = _types_of(schema)
    if types <= {"string"}:
        return text
    word = text.strip().lower()
    if "null" in types and word in ("null", "none"):
        return None
    if "boolean" in types and word in ("true", "false"):
        return word == "true"
    try:
        value = whole_json(text)
    except ValueError:
        return text
    fits = _TYPES[type(value)] in types or ("number" in types and type(value) is int)
    return value if fits or "string" not in types else text


def _types_of(schema: Any) -> set[str]:
    """Return the names of the types that a schema allows; empty if it gives none."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type", ())
    types = {given} if isinstance(given, str) else set(given)
    types |= {_TYPES[type(value)] for value in schema.get("enum", ()) if type(value) in _TYPES}
    for key in ("anyOf", "oneOf", "allOf"):
        types = types.union(*(_types_of(choice) for choice in schema.get(key, ())))
    return types
