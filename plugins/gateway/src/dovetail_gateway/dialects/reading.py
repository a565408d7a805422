"""Fields: reads a request, with errors that name the field, its value and the expected value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.interfaces import Message, MessageCall
from dovetail_gateway.dialects.call import ApiError

_SHOWN = 80
"""Maximum characters of a wrong value in an error."""


class Fields:
    """A JSON object of a request. A null counts as an absent field. Methods raise ApiError if a field is wrong.

    Args:
        values: the values by name.
        where: the object's path in the request; empty for the request itself.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values, self._where = values, where

    def wrong(self, name: str, expected: str) -> ApiError:
        """Return the error for a field with a wrong value."""
        shown = json.dumps(self.values.get(name), ensure_ascii=False, default=str)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
        param = f"{self._where}.{name}".lstrip(".")
        return ApiError(
            400, "invalid_request", f"{param} is {shown}; expected {expected}", param=param
        )

    def get(self, name: str, kind: type | None = None, expected: str = "") -> Any:
        """Return a field, or None if absent. A value that is not of the type `kind` is an error, which names `expected`.

        A boolean is not an integer.
        """
        value = self.values.get(name)
        is_number = isinstance(value, bool) and kind is int
        if kind is not None and value is not None and (is_number or not isinstance(value, kind)):
            raise self.wrong(name, expected)
        return value

    def flag(self, name: str) -> bool:
        """Return whether a boolean field is present and true."""
        return bool(self.get(name, bool, "true or false"))

    def count(self, name: str, most: int | None = None) -> int | None:
        """Return an integer field of 1 or more, or None if absent."""
        value = self.get(name, int, expected := "an integer of 1 or more")
        if value is not None and (value < 1 or (most is not None and value > most)):
            raise self.wrong(name, expected if value < 1 else f"{most} at most")
        return value

    def named(self, name: str, expected: str) -> str:
        """Return a required text field that is not empty."""
        value: str | None = self.get(name, str, expected)
        if not value:
            raise self.wrong(name, expected)
        return value

    def inner(self, name: str) -> Fields:
        """Return an object field; an empty object if absent."""
        return Fields(self.get(name, dict, "an object") or {}, f"{self._where}.{name}".lstrip("."))

    def each(self, name: str, least: int = 0) -> list[Fields]:
        """Return the objects of a list field, which must have at least `least` objects."""
        expected = f"a list of {'one or more ' * bool(least)}objects"
        values = self.get(name, list, expected) or []
        if len(values) < least or not all(isinstance(value, dict) for value in values):
            raise self.wrong(name, expected)
        where = f"{self._where}.{name}".lstrip(".")
        return [Fields(value, f"{where}[{number}]") for number, value in enumerate(values)]

    def strings(self, name: str) -> tuple[str, ...]:
        """Return a field that is a list of texts; a single text counts as a list of one."""
        value = self.get(name)
        found = [value] if isinstance(value, str) else value or []
        if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
            raise self.wrong(name, "a text or a list of texts, of which none is empty")
        return tuple(found)

    def text(self, name: str) -> str:
        """Return the text of a content field; a list of text parts is joined."""
        value = self.get(name)
        if value is not None and not isinstance(value, (str, list)):
            raise self.wrong(name, "a text, or a list of text parts")
        return value if isinstance(value, str) else "".join(p.part() for p in self.each(name))

    def part(self) -> str:
        """Return the text of this object, a part of a message's content."""
        text = self.get("text") or self.get("refusal") or ""
        if not isinstance(text, str) or not {"text", "refusal"} & self.values.keys():
            raise self.wrong("type", "a text part: other types are not supported")
        return text

    def call(self, call_id: object, arguments: str) -> MessageCall:
        """Return this object as a tool call, with parsed arguments from the field that `arguments` names."""
        given = self.get(arguments)
        try:
            read = json.loads(given or "{}") if isinstance(given, str) else given
        except (ValueError, RecursionError):
            read = None
        function = {
            "name": self.named("name", "the name of a function"),
            "arguments": read if isinstance(read, dict) else given,
        }
        return {"id": str(call_id or ""), "type": "function", "function": function}

    def tool(self, parameters: str) -> dict[str, Any]:
        """Return this object as a function's schema for the chat template, with parameters from the field that `parameters` names."""
        function: dict[str, Any] = {"name": self.named("name", "the name of a function")}
        if self.get("description"):
            function["description"] = self.get("description")
        given = self.get(parameters, dict, "a JSON schema")
        function["parameters"] = given or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}

    def unapplied(self, names: Sequence[str], form: Fields, choice: object) -> tuple[str, ...]:
        """Return the names of a request's fields that have no effect.

        Args:
            names: names of sampling fields, which the run's config decides.
            form: the requested format of the answer; only text has an effect, other formats are not enforced.
            choice: the requested choice of tools; a required tool call is not enforced.
        """
        found = [name for name in names if self.get(name) is not None]
        found += ["response_format"] * (form.get("type") not in (None, "text"))
        return (*found, *["tool_choice"] * (choice not in (None, "auto", "none")))


def check_ends(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages unchanged if the last message is not the assistant's.

    Raises:
        ApiError: the last message is the assistant's, or there are no messages.
    """
    if messages and messages[-1]["role"] != "assistant":
        return messages
    what = "an assistant's message" if messages else "missing"
    message = f"the last message is {what}; expected a message of a user or a tool"
    raise ApiError(400, "invalid_request", message, param="messages")
