"""The filter `episode_outcome`: the episodes that it leaves out, and its actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.batch import Batch
from dovetail.config import config_from_mapping
from dovetail.errors import PlanError
from dovetail.interfaces import (
    EpisodeEnd,
    FinishReason,
    Groups,
    PluginContext,
    Trajectory,
    Turn,
)
from dovetail.planning.plan import Plan, make_plan
from dovetail.sections import PluginSection
from dovetail_agents.config import EpisodeOutcomeConfig, ToolAgentConfig
from dovetail_agents.episode_outcome import EpisodeOutcome
from dovetail_agents.tool_agent import ToolAgent
from dovetail_sdk.testing.conformance import AgentLoopConformance, SampleFilterConformance

HERE = str(Path(__file__).with_name("small_tools.py"))
ADD = '<call>{"name": "add", "arguments": {"a": 2, "b": 3}}</call>'
OUTCOMES = ("no_answer", "void_turn", "unreadable_call", "turns", "tokens", "calls")


class TestEpisodeOutcome(SampleFilterConformance):
    plugin = EpisodeOutcome


class TestMaskedVoidTurns(SampleFilterConformance):
    plugin = EpisodeOutcome
    config = EpisodeOutcomeConfig(outcomes=("void_turn",), answer="answer", action="mask")


def true_of(trajectory: Trajectory, reason: str = "stop", answer: str = r"\S") -> set[str]:
    """The outcomes that apply to an episode, each tested alone."""
    columns = Batch({"trajectory": [trajectory.as_json()], "finish_reason": [reason]})
    groups = Groups.of(np.zeros(1, np.int64))
    return {
        outcome
        for outcome in OUTCOMES
        if not EpisodeOutcome(
            EpisodeOutcomeConfig(outcomes=(outcome,), answer=answer),  # type: ignore[arg-type]
            PluginContext(),
        ).keep(columns, groups)[0]
    }


def of_agent(turns: list[str], **settings: Any) -> set[str]:
    """The outcomes of an episode of `tool_agent` in which the policy writes these turns."""
    tools = tuple(PluginSection(path=HERE, attribute=name) for name in ("Arithmetic", "Calls"))
    config = ToolAgentConfig(name="tool_agent", tools=tools[:1], parser=tools[1], **settings)
    members = {"plugin": ToolAgent, "config": config, "turns": tuple(turns), "__module__": __name__}
    (sample,) = type("Drawn", (AgentLoopConformance,), members)().draw(1)
    assert sample.trajectory is not None
    assert sample.completion is not None
    return true_of(sample.trajectory, str(sample.completion.finish_reason))


@pytest.mark.parametrize(
    ("turns", "settings", "expected"),
    [
        ([ADD, "5"], {}, set()),
        (["5"], {}, set()),
        ([ADD, "  "], {}, {"no_answer", "void_turn"}),
        ([ADD, ADD], {"max_turns": 2}, {"no_answer", "turns"}),
        (["<call>{</call>", "5"], {}, {"unreadable_call", "void_turn"}),
        ([ADD + ADD, "5"], {"max_calls_per_turn": 1}, {"calls"}),
    ],
)
def test_what_is_true_of_an_episode(
    turns: list[str], settings: dict[str, Any], expected: set[str]
) -> None:
    assert of_agent(turns, **settings) == expected


def episode(*texts: str, end: EpisodeEnd = EpisodeEnd.DONE, calls: int = 0) -> Trajectory:
    call = {"id": "0", "type": "function", "function": {"name": "submit", "arguments": {}}}
    turns = [
        Turn(start=0, stop=1, text=text, finish_reason=FinishReason.STOP, calls=(call,) * calls)
        for text in texts
    ]
    return Trajectory(turns=tuple(turns), end=end)


def test_an_episode_that_a_tool_ends_has_its_answer_in_the_call() -> None:
    assert true_of(episode("", calls=1)) == set()
    assert true_of(episode("", calls=1, end=EpisodeEnd.TOKENS)) == {"no_answer", "tokens"}


def test_a_turn_that_neither_calls_nor_matches_the_answer_is_void() -> None:
    assert true_of(episode(r"hm", r"\boxed{5}"), answer=r"\\boxed") == {"void_turn"}
    assert true_of(episode(r"\boxed{4}", r"\boxed{5}"), answer=r"\\boxed") == set()


def test_an_episode_whose_last_turn_was_cut_for_want_of_tokens_ended_there() -> None:
    assert true_of(episode("5"), reason="length") == {"tokens"}


def test_one_cut_sequence_leaves_out_its_episode_and_no_other() -> None:
    columns = Batch(
        {
            "trajectory": [episode("5").as_json()] * 3,
            "finish_reason": ["length", "stop", "stop"],
        }
    )
    groups = Groups.of(np.zeros(3, np.int64), np.array([0, 0, 1]))
    chosen = EpisodeOutcome(EpisodeOutcomeConfig(outcomes=("tokens",)), PluginContext())
    assert chosen.keep(columns, groups).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("settings", "fact"), [({"outcomes": ()}, "outcomes"), ({"answer": "("}, "regular expression")]
)
def test_a_wrong_setting_is_refused(settings: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        EpisodeOutcomeConfig(**settings)


def plan_of(*overrides: str) -> Plan:
    return make_plan(config_from_mapping({"model": {"path": "tiny"}}, overrides).config)


@pytest.mark.parametrize("action", ["drop", "mask"])
def test_a_plan_has_the_columns_of_episodes_and_a_mask_where_it_masks(action: str) -> None:
    filters = f"algorithm.sample_filters=[{{name: episode_outcome, action: {action}}}]"
    plan = plan_of("rollout.agent_loop=tool_agent", filters)
    provided = frozenset().union(*(part.provides for part in plan.collection))
    assert provided & {"turn_ids", "trajectory"} == {"trajectory"}
    assert ("loss_mask" in provided) == (action == "mask")


def test_a_filter_of_episodes_is_refused_without_episodes() -> None:
    with pytest.raises(PlanError) as caught:
        plan_of("algorithm.sample_filters=[episode_outcome]")
    assert "'episode_outcome'" in str(caught.value)
    assert "'single_turn'" in str(caught.value)
    assert "rollout.agent_loop" in str(caught.value.hint)
