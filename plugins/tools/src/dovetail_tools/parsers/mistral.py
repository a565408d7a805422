"""Mistral: calls after `[TOOL_CALLS]`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dovetail.interfaces import ParsedTurn, ToolParser, ToolSchema
from dovetail_tools.parsers.turn import TurnParts, json_at

MARK = "[TOOL_CALLS]"
_ARGUMENTS = re.compile(r"(?:\[CALL_ID\](?P<id>\w+)\s*)?(?:\[ARGS\]|(?=\{))")
"""What follows the name of a call."""


class Mistral(ToolParser):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`; or, since tokenizer v11, `[TOOL_CALLS]name[ARGS]{…}` for each call."""

    name = "mistral"
    api = ">=1.0,<2"

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
        turn = TurnParts(text, call=MARK, think=("[THINK]", "[/THINK]"))
        content, *segments = turn.rest.split(MARK)
        turn.text(content)
        for segment in filter(str.strip, segments):
            if segment.lstrip()[0] in "[{" and not segment.lstrip().startswith("[ARGS]"):
                self._array(turn, segment)
            elif (found := _ARGUMENTS.search(segment)) is not None:
                name = segment[: found.start()].strip()
                try:
                    arguments, end = json_at(segment, found.end())
                except ValueError as error:
                    turn.error(f"the arguments of {name!r} are no JSON object: {error}")
                    continue
                turn.call(name, arguments, found["id"])
                turn.text(segment[end:])
            else:
                turn.error(f"the call {segment.strip()[:80]!r} has no arguments")
        return turn.finish()

    def _array(self, turn: TurnParts, segment: str) -> None:
        try:
            value, end = json_at(segment, 0)
        except ValueError as error:
            turn.error(f"what follows {MARK} is no JSON array: {error}")
            return
        for one in value if isinstance(value, list) else [value]:
            turn.call_object(one, default={})
        turn.text(segment[end:])
