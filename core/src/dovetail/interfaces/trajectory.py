"""Trajectory: the record of one episode, turn by turn. T: tokens of a response, produced by the policy or shown to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import attrs

from dovetail.interfaces.rollout import FinishReason

Message: TypeAlias = Mapping[str, Any]
"""A message as chat templates take it: `role`, `content`, and other keys that the template reads."""
MessageCall: TypeAlias = Mapping[str, Any]
"""A tool call as chat templates take it: `{"id", "type": "function", "function": {"name", "arguments"}}`, arguments by name."""


_LEVELS = 150
"""Maximum depth of a turn's JSON value, which is written recursively. `ToolParser` refuses arguments of more than 100 levels."""


class EpisodeEnd(StrEnum):
    """The reason for the end of an episode; only for episodes that can be scored."""

    DONE = "done"
    """The agent loop returned."""
    TURNS = "turns"
    """`max_turns` was reached."""
    TOKENS = "tokens"
    """The response has reached its limit of tokens, or has no room for the messages that the policy was to see."""


@attrs.frozen(kw_only=True)
class Turn:
    """A turn of the policy, and the messages shown after it."""

    start: int
    """Offset of the turn's first token in the response of its sequence."""
    stop: int
    """Offset after the turn's last token, including the end-of-turn token if the policy produced it."""
    text: str
    """Text that the policy produced, special tokens included, without the token that ended the turn."""
    finish_reason: FinishReason
    calls: tuple[MessageCall, ...] = ()
    """The tool calls that the agent loop found in the turn."""
    observed: tuple[Message, ...] = ()
    """Messages after the turn, as the policy was shown them."""
    reward: float = 0.0
    """Sum of the rewards that the agent loop gave the turn with `Session.reward`."""
    sequence: int = 0
    """Index, from 0, of the trajectory's sequence that contains the turn; known once the episode has ended."""


@attrs.frozen(kw_only=True)
class Trajectory:
    """The record of an episode that has ended."""

    turns: tuple[Turn, ...]
    """The turns in order, sequence by sequence."""
    end: EpisodeEnd = EpisodeEnd.DONE
    seconds: float = 0.0
    """Duration of the episode, in seconds."""
    began: float = 0.0
    """Start of the episode, in seconds since 1970 (`time.time`); 0 if unknown."""
    counts: Mapping[str, float] = attrs.field(factory=dict)
    """Counters that the agent loop increased with `Session.count`, by name."""
    output: Any = None
    """Final value of `Session.output`, a JSON value."""

    @property
    def sequence_count(self) -> int:
        """Number of the trajectory's sequences."""
        return 1 + max((turn.sequence for turn in self.turns), default=0)

    @property
    def calls(self) -> tuple[MessageCall, ...]:
        """Every tool call, in order."""
        return tuple(call for turn in self.turns for call in turn.calls)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """The agent loop's reward of each turn."""
        return tuple(turn.reward for turn in self.turns)

    def as_json(self) -> dict[str, Any]:
        """Return the trajectory as JSON values, which `from_json` reads."""
        return attrs.asdict(self, value_serializer=_plain)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Trajectory:
        """Return the trajectory that `as_json` wrote."""
        return cls(
            turns=tuple(_turn(turn) for turn in document["turns"]),
            end=EpisodeEnd(document["end"]),
            seconds=document["seconds"],
            began=document.get("began", 0.0),
            counts=document["counts"],
            output=document.get("output"),
        )


def _plain(_: object, __: object, value: Any, levels: int = _LEVELS) -> Any:
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        return value
    if not levels:
        return "…"  # Only a user's parser or agent loop lets a value of this depth through.
    if isinstance(value, Mapping):
        return {str(key): _plain(None, None, entry, levels - 1) for key, entry in value.items()}
    return [_plain(None, None, entry, levels - 1) for entry in value]


def _turn(document: Mapping[str, Any]) -> Turn:
    named = {
        **document,
        "finish_reason": FinishReason(document["finish_reason"]),
        "calls": tuple(document["calls"]),
        "observed": tuple(document["observed"]),
    }
    return Turn(**named)
