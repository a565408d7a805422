"""A preflight rule about the agent loop `tool_agent`: it needs a tool, and its time limits must exceed those of its tools."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from dovetail.errors import DovetailError
from dovetail.interfaces import Finding
from dovetail.plugins import load_plugin_class, ref_for
from dovetail_agents.config import ToolAgentConfig

_LOOP = "rollout.agent_loop"


def tool_agent_unfit(config: Any, plan: Any) -> Iterator[Finding]:
    """Report a `tool_agent` that has no tool, or whose time limits are in the wrong order.

    `max_seconds` should be above `call_seconds`, and both above the time limit that a tool itself sets for a call.

    A tool that reaches its own limit reports this to the policy. A call that reaches the agent loop's limit fails the episode without a
    score, so that a policy could learn to avoid bad scores.
    """
    loop = config.rollout.agent_loop
    if not isinstance(loop, ToolAgentConfig):
        return
    if not loop.tools:
        yield Finding.error(
            f"{_LOOP}.tools is empty: tool_agent has no tool for the policy to call",
            hint=f"set {_LOOP}.tools=[calculator], or {_LOOP}=single_turn",
        )
    limits = {"call_seconds": loop.call_seconds, "max_seconds": loop.max_seconds}
    set_ = {key: seconds for key, seconds in limits.items() if seconds is not None}
    if len(set_) == 2 and set_["call_seconds"] >= set_["max_seconds"]:
        yield Finding.warning(
            f"{_LOOP}.call_seconds = {loop.call_seconds:g} is not below {_LOOP}.max_seconds = {loop.max_seconds:g}: "
            "an episode reaches its limit before a call can reach its own",
            hint=f"raise {_LOOP}.max_seconds, or lower {_LOOP}.call_seconds",
        )
    key = min(set_, key=set_.__getitem__, default="")
    for number, section in enumerate(loop.tools):
        try:
            tool: Any = load_plugin_class(ref_for("tool", section))
        except DovetailError:
            continue  # the planner reports the error
        longest = tool.longest_call(section)
        if longest is not None and longest >= set_.get(key, math.inf):
            yield Finding.warning(
                f"{_LOOP}.{key} = {set_[key]:g} is not above the {longest:g} s that {_LOOP}.tools[{number}] = {section.name or section.attribute} "
                "allows for one call: the episode fails before the tool can show the policy an error",
                hint=f"set {_LOOP}.{key}={math.ceil(longest) + 10} or more, or lower the tool's own limit (`time_limit` of python)",
            )
