"""Helpers of the parsers: collect a turn's reasoning, text and calls, and read JSON inside text."""

from __future__ import annotations

import json
import re
from typing import Any

from dovetail.interfaces import ParsedTurn, ToolCall, problem_of

_END = re.compile(r"(?:<\|\w+\|>|<｜end▁of▁sentence｜>|</s>)\Z")
"""Pattern of a special token at the end of a turn."""
_LONGEST_END = 40
"""Maximum length of such a special token, in characters."""
_SPACE = re.compile(r"\s*")
_SHOWN = 120
"""Number of characters of a call that an error message shows."""


class TurnParts:
    """The reasoning, text and calls of an assistant's turn, collected while it is parsed.

    Args:
        text: the turn, with its special tokens.
        think: the tags around reasoning. The chat template may have written the opening tag into the prompt.
        call: the tag that begins a call; a closing tag of reasoning after it belongs to the call.
    """

    def __init__(
        self, text: str, *, call: str, think: tuple[str, str] = ("<think>", "</think>")
    ) -> None:
        self.reasoning: str | None = None
        self.rest = _without_end(text)
        """The text after the reasoning."""
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._errors: list[str] = []
        opening, closing = think
        opened = self.rest.lstrip().startswith(opening)
        before, closed, after = self.rest.partition(closing)
        if opened or (closed and call not in before):
            self.reasoning = before.strip().removeprefix(opening).strip() or None
            self.rest = after

    def text(self, text: str) -> None:
        """Add text outside of calls."""
        self._content.append(text)

    def call(self, name: object, arguments: object, call_id: str | None = None) -> None:
        """Add a call, or an error if its name or arguments are invalid."""
        if not isinstance(name, str) or not name.strip() or problem_of(name):
            self.error(f"a tool call has the name {name!r:.{_SHOWN}}; expected a function's name")
        elif not isinstance(arguments, dict):
            self.error(
                f"the arguments of {name.strip()!r} are {json.dumps(arguments)[:_SHOWN]}; expected a JSON object"
            )
        elif problem := problem_of(arguments):
            self.error(f"the arguments of {name.strip()!r} {problem}")
        else:
            call_id = call_id or f"call_{len(self._calls)}"
            self._calls.append(ToolCall(id=call_id, name=name.strip(), arguments=arguments))

    def call_object(self, value: object, default: object = None) -> None:
        """Add a call from an object with `name`, and `arguments` or `parameters`; without either, the arguments are `default`."""
        if not isinstance(value, dict):
            shown = json.dumps(value)[:_SHOWN]
            self.error(f"a tool call is {shown}; expected an object with name and arguments")
            return
        arguments = value.get("arguments", value.get("parameters", default))
        self.call(value.get("name"), arguments)

    def call_json(self, name: str, arguments: str, call_id: str | None = None) -> None:
        """Add a call whose arguments are JSON text, with nothing around it."""
        try:
            self.call(name, whole_json(arguments), call_id)
        except ValueError as error:
            self.error(f"the arguments of {name.strip()!r} are not a JSON object: {error}")

    def error(self, message: str) -> None:
        """Add an error message about a call."""
        self._errors.append(message)

    def finish(self) -> ParsedTurn:
        """Return the parsed turn."""
        return ParsedTurn(
            content="".join(self._content).strip(),
            reasoning=self.reasoning,
            calls=tuple(self._calls),
            errors=tuple(self._errors),
        )


def json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a position, after white space, and the position of its end.

    Raises:
        ValueError: the text is not JSON or is nested too deeply, or a number is invalid or too long.
    """
    space = _SPACE.match(text, start)
    assert space is not None
    try:
        value, end = _DECODER.raw_decode(text, space.end())
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    return value, end


def whole_json(text: str) -> Any:
    """Parse a text that consists of exactly one JSON value, and return the value.

    Raises:
        ValueError: see `json_at`; or text follows the value.
    """
    value, end = json_at(text, 0)
    if text[end:].strip():
        raise ValueError(f"{text[end:].strip()[:_SHOWN]!r} follows the JSON value")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _without_end(text: str) -> str:
    """Return a turn's text without the special tokens at its end."""
    text = text.rstrip()
    while (found := _END.search(text[-_LONGEST_END:])) is not None:
        text = text[: len(text) - len(found[0])].rstrip()
    return text
