"""`xlam_function_calling`: questions with tools, and the tool calls that answer each question."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dovetail_datasets.prepare.recipe import DataRecipe, text_of, wrong

_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    **dict.fromkeys(("list", "tuple", "set"), "array"),
}
"""Python type names, in lower case and without type parameters → JSON Schema types."""


class XlamFunctionCallingRecipe(DataRecipe):
    """xLAM function calling: 60,000 questions with tools and the calls that answer them, as conversations (arXiv 2406.18518).

    Downloading requires accepting its terms on the hub. A share of the questions is held out.
    """

    name = "xlam_function_calling"
    api = ">=1.0,<2"
    aliases = ("Salesforce/xlam-function-calling-60k",)
    repository = "Salesforce/xlam-function-calling-60k"
    licence = "CC-BY-4.0"
    train_files = "xlam_function_calling_60k.json"
    rows_are = "conversations"
    changes = (
        "A row is a conversation: the query, and an assistant's turn with the calls of `answers`.",
        "`tools` are JSON schemas: Python's types become those of JSON Schema, and parameters that are not optional and have no default are required.",
    )

    def convert(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        calls = [
            {
                "type": "function",
                "function": {
                    "name": text_of(call, "name", f"{where}, 'answers'"),
                    "arguments": call.get("arguments", {}),
                },
            }
            for call in _listed(row, "answers", where)
        ]
        tools = [_tool(tool, f"{where}, 'tools'") for tool in _listed(row, "tools", where)]
        return {
            "messages": [
                {"role": "user", "content": text_of(row, "query", where)},
                {"role": "assistant", "content": "", "tool_calls": _text(calls)},
            ],
            "tools": _text(tools),
        }


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _listed(row: Mapping[str, Any], column: str, where: str) -> list[Mapping[str, Any]]:
    """Return the list of mappings that a column contains as JSON text."""
    text = text_of(row, column, where)
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not found or not all(isinstance(m, Mapping) for m in found):
        raise wrong(where, column, text, "a JSON list of mappings")
    return found


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a tool in the form of chat templates."""
    given = tool.get("parameters") or {}
    if not isinstance(given, Mapping) or not all(isinstance(p, Mapping) for p in given.values()):
        raise wrong(
            where,
            "parameters",
            given,
            f"a mapping from each parameter of {tool.get('name')!r} to a mapping that describes it",
        )
    parameters = {
        "type": "object",
        "properties": {name: _parameter(each) for name, each in given.items()},
        "required": [
            name
            for name, each in given.items()
            if "default" not in each and "optional" not in str(each.get("type", ""))
        ],
    }
    function = {
        "name": text_of(tool, "name", where),
        "description": tool.get("description", ""),
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


def _parameter(given: Mapping[str, Any]) -> dict[str, Any]:
    named = str(given.get("type", "")).partition("[")[0].partition(",")[0].strip().lower()
    kind = {"type": _TYPES[named]} if named in _TYPES else {}
    return {**kind, **{key: given[key] for key in ("description", "default") if key in given}}
