"""ToolParser: finds the tool calls in a policy's text."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from dovetail.interfaces.plugin import Plugin
from dovetail.interfaces.tool import ToolSchema

MAX_NESTING = 100
"""Maximum nesting of the arguments of a call, since code that walks through them is recursive."""


@attrs.frozen(kw_only=True)
class ToolCall:
    """One call of a function."""

    id: str
    """Id of the call, unique in the turn: the model's own if its format has one, else `call_0`, `call_1`, …"""
    name: str
    arguments: Mapping[str, Any]
    """Arguments by the name of the parameter: JSON values that are not yet compared with the function's schema."""


def problem_of(arguments: object) -> str | None:
    """Return why the arguments of a call, JSON values, can't be sent, stored or shown; None if they can."""
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "hold half of a surrogate pair"
    except ValueError:
        return "hold a number that is not finite, or has more digits than can be written"
    except RecursionError:
        return "are nested too deeply"
    except TypeError:
        return None  # Only a user's agent loop builds calls with objects that JSON does not have.
    return (
        None
        if _depth_fits(arguments, MAX_NESTING)
        else f"are nested more than {MAX_NESTING} levels deep"
    )


def _depth_fits(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value
    if not isinstance(inner, Iterable) or isinstance(value, str):
        return True
    return levels > 0 and all(_depth_fits(one, levels - 1) for one in inner)


@attrs.frozen(kw_only=True)
class ParsedTurn:
    """The parts of a policy's turn."""

    content: str
    """The text for the user, outside of reasoning and calls, without white space around it."""
    reasoning: str | None = None
    """The reasoning text; None if the turn has none."""
    calls: tuple[ToolCall, ...] = ()
    """The tool calls, in order."""
    errors: tuple[str, ...] = ()
    """The problem of each call that can't be read, which the policy sees as an observation."""


class ToolParser(Plugin):
    """Splits a turn into reasoning, content and calls, in the format of a family of models."""

    served_as: ClassVar[Mapping[str, str]] = {}
    """Name of this parser in each inference server that has it, such as `{"vllm": "llama3_json", "sglang": "llama3"}`."""
    reasoning_as: ClassVar[Mapping[str, str]] = {}
    """Name of the reasoning parser for this format in each inference server."""
    reasoning_tag: ClassVar[str] = "<think>"
    """Text in a chat template that shows that the model reasons before it answers."""

    @abstractmethod
    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
        """Parse one turn. A call that can't be parsed becomes an error of the turn; no text of a policy raises an exception.

        A truncated call is an error too.

        Args:
            text: the turn, decoded with special tokens, with or without the end-of-turn token.
            tools: schemas of the functions that the policy can call, for formats whose arguments have no types of their own.
        """
