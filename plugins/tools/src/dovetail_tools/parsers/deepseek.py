"""The parser of DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from dovetail.interfaces import ParsedTurn, ToolParser, ToolSchema
from dovetail_tools.parsers.turn import TurnParts, json_at

ALL_OPEN, ALL_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, SEP, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_NEXT = re.compile(f"{OPEN}|{ALL_CLOSE}")
_FENCE = re.compile(r"(?P<name>[^\n]*)\n```json\n")
_END = re.compile(rf"\s*(?:\n```\s*)?{CLOSE}")


class DeepSeekV3(ToolParser):
    """Parses calls: in V3 and R1 `function<｜tool▁sep｜>f` and the arguments in a fenced block, in V3.1 `f<｜tool▁sep｜>{…}`."""

    name = "deepseek_v3"
    aliases = ("deepseek", "deepseek_v31")
    api = ">=1.0,<2"
    served_as: ClassVar[Mapping[str, str]] = {"vllm": "deepseek_v3", "sglang": "deepseekv3"}
    reasoning_as: ClassVar[Mapping[str, str]] = {"vllm": "deepseek_r1", "sglang": "deepseek-r1"}

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
        turn = TurnParts(text, call=ALL_OPEN)
        content, _, rest = turn.rest.partition(ALL_OPEN)
        turn.text(content)
        position = 0
        while (found := _NEXT.search(rest, position)) is not None and found[0] == OPEN:
            position = self._call(turn, rest, found.end())
        turn.text("" if found is None else rest[found.end() :])
        return turn.finish()

    def _call(self, turn: TurnParts, text: str, start: int) -> int:
        """Read the call that begins at `start`, after an opening tag, and add it to `turn`; return the offset where parsing continues."""
        end = text.find(CLOSE, start)
        separator = text.find(SEP, start, end)
        if end < 0 or separator < 0:
            turn.error(f"the call {text[start:end].strip()[:80]!r} was cut off or has no {SEP}")
            return len(text) if end < 0 else end
        name, begin = text[start:separator], separator + len(SEP)
        if (fence := _FENCE.match(text, begin)) is not None:
            name, begin = fence["name"], fence.end()
        what = f"the arguments of {name.strip()!r} are not a JSON object"
        try:
            value, end_of_value = json_at(text, begin)
        except ValueError as error:
            turn.error(f"{what}: {error}")
            return end
        closing = _END.match(text, end_of_value)
        if closing is None:
            turn.error(f"{what}: {text[end_of_value:end].strip()[:80]!r} follows the JSON value")
            return end
        turn.call(name, value)
        return closing.end()
