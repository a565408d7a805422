"""Trajectory: what happened in one episode, turn by turn. T tokens of its response: what the policy produced and what it was shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import attrs

from dovetail.interfaces.rollout import FinishReason

Message: TypeAlias = Mapping[str, Any]
"""A message as chat templates take it: `role`, `content`, and what else the template reads."""
MessageCall: TypeAlias = Mapping[str, Any]
"""A tool call as chat templates take it: `{"id", "type": "function", "function": {"name", "arguments"}}`, arguments by name."""


_LEVELS = 150
"""Maximum depth of a turn's JSON value: `ToolParser` refuses more than 100 levels of arguments, and writing them recurses."""


class EpisodeEnd(StrEnum):
    """Why an episode that can be scored ended."""

    DONE = "done"
    """The agent loop returned."""
    TURNS = "turns"
    """`max_turns` was reached."""
    TOKENS = "tokens"
    """The response has as many tokens as it may have, or has no room for what the policy was to be shown."""


@attrs.frozen(kw_only=True)
class Turn:
    """A turn of the policy, and the messages shown after it."""

    start: int
    """Offset of its first token in the response of its sequence."""
    stop: int
    """Offset after its last token; the turn's end-of-turn token, where the policy produced it, is within."""
    text: str
    """What the policy produced, special tokens included, without the token that ended the turn."""
    finish_reason: FinishReason
    calls: tuple[MessageCall, ...] = ()
    """The tool calls that the agent loop found in it."""
    observed: tuple[Message, ...] = ()
    """What the policy was shown after it, as it was shown."""
    reward: float = 0.0
    """What the agent loop gave for it with `Session.reward`, summed."""
    sequence: int = 0
    """Which of the trajectory's sequences it is in; known once the episode has ended."""


@attrs.frozen(kw_only=True)
class Trajectory:
    """One episode that has ended."""

    turns: tuple[Turn, ...]
    """In order; those of a sequence after those of the sequence before."""
    end: EpisodeEnd = EpisodeEnd.DONE
    seconds: float = 0.0
    """How long it took."""
    began: float = 0.0
    """When it began, in seconds since 1970 (`time.time`); 0 where that is not known."""
    counts: Mapping[str, float] = attrs.field(factory=dict)
    """What the agent loop counted with `Session.count`, by name."""
    output: Any = None
    """What the agent loop left in `Session.output`, a JSON value."""

    @property
    def sequence_count(self) -> int:
        """How many sequences have its turns."""
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
        """Return it as JSON values, which `from_json` reads."""
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
        return "…"  # of what a parser or a loop of the user did not refuse
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
