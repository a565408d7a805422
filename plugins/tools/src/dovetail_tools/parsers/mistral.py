"""Mistral: calls after `[TOOL_CALLS]`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from dovetail.interfaces import ParsedTurn, ToolParser, ToolSchema
from dovetail_tools.parsers.turn import TurnParts, json_at

MARK = "[TOOL_CALLS]"
_ARGUMENTS = re.compile(r"(?:\[CALL_ID\](?P<id>\w+)\s*)?(?:\[ARGS\]|(?=\{))")
"""Pattern of the text between a call's name and its arguments."""


class Mistral(ToolParser):
    """Parses `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`; or, since tokenizer v11, `[TOOL_CALLS]name[ARGS]{…}` for each call."""

    name = "mistral"
    api = ">=1.0,<2"
    served_as: ClassVar[Mapping[str, str]] = {"vllm": "mistral", "sglang": "mistral"}

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
        turn = TurnParts(text, call=MARK, think=("[THINK]", "[/THINK]"))
        rest, position = turn.rest, 0
        while (mark := rest.find(MARK, position)) >= 0:
            turn.text(rest[position:mark])
            position = self._call(turn, rest, mark + len(MARK))
        turn.text(rest[position:])
        return turn.finish()

    def _call(self, turn: TurnParts, text: str, start: int) -> int:
        """Read the call, or array of calls, that begins at `start`, after `[TOOL_CALLS]`, and add the calls to `turn`.

        Returns:
            The offset at which parsing continues.
        """
        mark = text.find(MARK, start)
        # `end` bounds the search for a call's parts. A mark may also stand inside the arguments, which `json_at` reads beyond `end`.
        end = mark if mark >= 0 else len(text)
        segment = text[start:end].strip()
        array = segment[:1] in ("[", "{") and not segment.startswith("[ARGS]")
        found = None if array else _ARGUMENTS.search(text, start, end)
        if not array and found is None:
            if segment:
                turn.error(f"the call {segment[:80]!r} has no arguments")
            return end
        name = "" if found is None else text[start : found.start()].strip()
        try:
            value, end_of_value = json_at(text, start if found is None else found.end())
        except ValueError as error:
            what = (
                f"what follows {MARK} is not a JSON array"
                if array
                else f"the arguments of {name!r} are not a JSON object"
            )
            turn.error(f"{what}: {error}")
            return end
        if found is not None:
            turn.call(name, value, found["id"])
        else:
            for one in value if isinstance(value, list) else [value]:
                turn.call_object(one, default={})
        return end_of_value
