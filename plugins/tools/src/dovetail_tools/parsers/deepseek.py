"""DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dovetail.interfaces import ParsedTurn, ToolParser, ToolSchema
from dovetail_tools.parsers.turn import TurnParts

ALL_OPEN, ALL_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, SEP, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"(?P<name>[^\n]*)\n```json\n(?P<arguments>.*)\n```\s*", re.DOTALL)


class DeepSeekV3(ToolParser):
    """In V3 and R1 a call is `function<｜tool▁sep｜>f`, then the arguments in a fenced block; in V3.1 `f<｜tool▁sep｜>{…}`."""

    name = "deepseek_v3"
    aliases = ("deepseek", "deepseek_v31")
    api = ">=1.0,<2"

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
        turn = TurnParts(text, call=ALL_OPEN)
        content, _, calls = turn.rest.partition(ALL_OPEN)
        turn.text(content)
        calls, _, after = calls.partition(ALL_CLOSE)
        turn.text(after)
        for one in calls.split(OPEN)[1:]:
            body, closed, _ = one.partition(CLOSE)
            left, separated, right = body.partition(SEP)
            if not (closed and separated):
                turn.error(f"the call {body.strip()[:80]!r} was cut off or has no {SEP}")
            elif (fenced := _FENCED.fullmatch(right)) is not None:
                turn.call_json(fenced["name"], fenced["arguments"])
            else:
                turn.call_json(left, right)
        return turn.finish()
