"""Harmony: the message format of gpt-oss; a message has a channel and, if it is a call, a recipient."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

from dovetail.interfaces import ParsedTurn, ToolParser, ToolSchema
from dovetail_tools.parsers.turn import TurnParts, json_at

_MESSAGE = "<|message|>"
_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z")
_CHANNEL = re.compile(r"<\|channel\|>\s*(?P<channel>\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?(?P<name>[^\s<]+)")


class Harmony(ToolParser):
    """Parses `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>`; reasoning is in the channel `analysis`."""

    name = "harmony"
    aliases = ("gpt_oss", "openai")
    api = ">=1.0,<2"
    served_as: ClassVar[Mapping[str, str]] = {"vllm": "openai", "sglang": "gpt-oss"}
    reasoning_as: ClassVar[Mapping[str, str]] = {"vllm": "openai_gptoss", "sglang": "gpt-oss"}
    reasoning_tag = "<|channel|>"

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
        if "<|" not in text:
            return ParsedTurn(content=text.strip())
        turn = TurnParts("", call="")
        end = 0
        thoughts: list[str] = []
        contents: list[str] = []
        while (start := text.find(_MESSAGE, end)) >= 0:
            header = text[end:start]
            start += len(_MESSAGE)
            channel = _CHANNEL.search(header)
            recipient = _RECIPIENT.search(header)
            behind = start
            if recipient is not None:
                with suppress(ValueError):  # skip the arguments, which may spell an end mark
                    behind = json_at(text, start)[1]
            ending = _END.search(text, behind)
            assert ending is not None
            body, end = text[start : ending.start()], ending.end()
            if recipient is not None and channel is None:
                turn.error(f"the call of {recipient['name']!r} has no <|channel|>")
            elif recipient is not None:
                turn.call_json(recipient["name"], body)
            elif channel is not None and channel["channel"] == "analysis":
                thoughts.append(body.strip())
            else:
                contents.append(body.strip())
        if (cut := _RECIPIENT.search(text, end)) is not None:
            turn.error(f"the call of {cut['name']!r} was cut off")
        turn.text("\n".join(contents))
        turn.reasoning = "\n".join(thoughts) or None
        return turn.finish()
