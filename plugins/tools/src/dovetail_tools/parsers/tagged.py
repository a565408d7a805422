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
    """Base of parsers of functions and parameters that are tags."""

    call: ClassVar[str]
    """What begins a function's tag."""
    function: ClassVar[re.Pattern[str]]
    """A function's opening tag; `name` is its name."""
    function_end: ClassVar[str]
    parameter: ClassVar[re.Pattern[str]]
    """A parameter's opening tag; `name` is its name."""
    around: ClassVar[re.Pattern[str]]
    """Tags around calls, which are no content."""

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
        turn = TurnParts(text, call=self.call)
        rest, position = turn.rest, 0
        while (found := self.function.search(rest, position)) is not None:
            turn.text(self.around.sub("", rest[position : found.start()]))
            name = found["name"].strip()
            end = rest.find(self.function_end, found.end())
            if end < 0:
                turn.error(f"the call of {name!r} has no {self.function_end}")
                return turn.finish()
            try:
                properties = _properties(tools, name)
                turn.call(name, self._arguments(rest[found.end() : end], properties))
            except ValueError as error:
                turn.error(f"the call of {name!r} can't be read: {error}")
            position = end + len(self.function_end)
        tail = rest[position:]
        if (cut := tail.rfind(self.call)) >= 0 and ">" not in tail[cut:]:
            turn.error(f"a call has no function's name: {tail[cut : cut + 80]!r}")
            tail = tail[:cut]
        turn.text(self.around.sub("", tail))
        return turn.finish()

    def _arguments(self, body: str, properties: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call. Raises ValueError where a parameter has no name or is not closed."""
        arguments: dict[str, Any] = {}
        tags = list(self.parameter.finditer(body))
        ends = [tag.start() for tag in tags[1:]] + [len(body)]
        for tag, end in zip(tags, ends, strict=False):
            name = tag["name"].strip()
            if not name:
                raise ValueError("a parameter has no name")
            value, closed, _ = body[tag.end() : end].partition(PARAMETER_END)
            if not closed:
                raise ValueError(f"parameter {name!r} has no {PARAMETER_END}")
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[name] = _typed(value, properties.get(name))
        return arguments


class Qwen3Coder(Tagged):
    """`<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5."""

    name = "qwen3_coder"
    aliases = ("qwen3_xml",)
    api = ">=1.0,<2"
    call = "<function="
    function = re.compile(r"<function=(?P<name>[^>]{0,200})>")
    function_end = "</function>"
    parameter = re.compile(r"<parameter=(?P<name>[^<>\n]{0,200})>")
    around = re.compile(r"</?tool_call>")


class Xml(Tagged):
    """`<invoke name="f"><parameter name="x">1</parameter></invoke>`, in tags of any name that ends in `tool_call` or `function_calls`."""

    name = "xml"
    aliases = ("minimax_m2",)
    api = ">=1.0,<2"
    call = "<invoke"
    function = re.compile(r"<invoke\s{1,9}name=[\"']?(?P<name>[^\"'>]{0,200})[\"']?\s{0,9}>")
    function_end = "</invoke>"
    parameter = re.compile(
        r"<parameter\s{1,9}name=[\"']?(?P<name>[^\"'>]{0,200})[\"']?[^>]{0,200}>"
    )
    around = re.compile(r"</?[\w:]*(?:tool_calls?|function_calls)>")


def _properties(tools: Sequence[ToolSchema], name: str) -> Mapping[str, Any]:
    """The schemas of a function's parameters; none where it is not known."""
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}


def _typed(text: str, schema: Any) -> Any:
    """A parameter's text as its schema wants it; the text itself where it can't be read so."""
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
    """Names of the types that a schema admits; none where it says nothing."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type", ())
    types = {given} if isinstance(given, str) else set(given)
    types |= {_TYPES[type(value)] for value in schema.get("enum", ()) if type(value) in _TYPES}
    for key in ("anyOf", "oneOf", "allOf"):
        types = types.union(*(_types_of(choice) for choice in schema.get(key, ())))
    return types
