"""Config classes of the agent loops. Nothing here imports more than the config sections."""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

import re
from typing import Any, Literal

import attrs

from dovetail.sections import ABOVE_ZERO, EpisodeSection, PluginSection, plugin_field


@attrs.frozen(kw_only=True)
class ToolAgentConfig(EpisodeSection):
    """Settings of `tool_agent`, whose episodes end with a turn without tool calls."""

    tools: tuple[PluginSection, ...] = plugin_field("tool", None, collection="list")
    """The tools that the policy can call, in the order in which the prompt describes them."""
    parser: PluginSection | None = plugin_field("tool_parser", "hermes")
    """Parser of the model's tool calls."""
    max_calls_per_turn: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    """Maximum tool calls that one turn may run; they run concurrently. Set 1 for chat templates that accept only one call per turn."""
    call_seconds: float | None = attrs.field(default=60.0, validator=ABOVE_ZERO)
    """Seconds that a call may run. A longer call is cancelled, and its episode fails with the reason `tool`."""
    retries: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Retries of a call whose tool failed. Errors that a tool reports to the policy are not retried."""
    max_running_calls: int = attrs.field(default=256, validator=attrs.validators.ge(1))
    """Maximum concurrent calls over all episodes. Waiting for a free slot does not count towards `call_seconds`."""


def _pattern(_config: Any, _attribute: Any, value: str) -> None:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"answer={value!r} is not a regular expression: {error}") from None


@attrs.frozen(kw_only=True)
class EpisodeOutcomeConfig(PluginSection):
    """Settings of `episode_outcome`, which excludes episodes from training by how they ended or by errors in them."""

    outcomes: tuple[
        Literal["no_answer", "void_turn", "unreadable_call", "turns", "tokens", "calls"], ...
    ] = attrs.field(
        default=("no_answer", "unreadable_call", "turns", "tokens"),
        validator=attrs.validators.min_len(1),
    )
    """Conditions under which an episode is dropped or masked; the table of `episode_outcome` explains each. `turns` and
    `tokens`: the episode reached `max_turns` or data.max_response_length. `calls`: a turn has more calls than `max_calls_per_turn`."""
    answer: str = attrs.field(default=r"\S", validator=_pattern)
    """Regular expression that is searched for in a turn's text: a turn without a match is not an answer."""
    action: Literal["drop", "mask"] = "drop"
    """drop: the episodes are removed from their group. mask: the episodes count in the group's statistics, but have no loss."""
