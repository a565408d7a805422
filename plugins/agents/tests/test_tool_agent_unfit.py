"""Findings of `dovetail check` about a tool_agent without a tool, and about limits that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.interfaces import Finding
from dovetail_agents.preflight import tool_agent_unfit
from dovetail_sdk.testing import findings_of


def loop(**settings: Any) -> str:
    given = "".join(f", {key}: {value}" for key, value in settings.items())
    return f"rollout.agent_loop={{name: tool_agent{given}}}"


def findings(**settings: Any) -> list[Finding]:
    return findings_of(tool_agent_unfit, loop(**settings))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (loop(tools="[calculator]"),),
        (loop(tools="[{name: python, time_limit: 19}]"),),
        (loop(tools="[{name: python, time_limit: 500}]", call_seconds="null", max_seconds="null"),),
    ],
)
def test_what_fits_is_left_alone(overrides):
    assert findings_of(tool_agent_unfit, *overrides) == []


def test_no_tool_is_an_error():
    [found] = findings()
    assert found.severity == "error"
    assert "rollout.agent_loop.tools" in found.message


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({}, ("tools[1] = python", "92 s", "call_seconds = 60")),
        ({"call_seconds": 92}, ("92 s", "call_seconds = 92")),
        ({"call_seconds": "null", "max_seconds": 80}, ("92 s", "max_seconds = 80")),
    ],
)
def test_a_tool_that_may_take_longer_than_a_call_is_named_with_both_limits(settings, facts):
    tools = "[calculator, {name: python, time_limit: 30}]"
    [found] = findings(tools=tools, **settings)
    assert found.severity == "warning"
    assert all(fact in found.message for fact in facts)


@pytest.mark.parametrize(("call", "episode", "warned"), [(60, 60, 1), (60, 30, 1), (60, 61, 0)])
def test_the_limit_of_a_call_is_below_that_of_the_episode(call, episode, warned):
    found = findings(tools="[calculator]", call_seconds=call, max_seconds=episode)
    assert len(found) == warned
