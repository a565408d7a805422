"""The agent loop in which a policy calls tools: observations, ends and failures of an episode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.errors import PluginBrokenError
from dovetail.interfaces import Failure, FailureKind, PluginContext, Sample
from dovetail.sections import PluginSection
from dovetail_agents.config import ToolAgentConfig
from dovetail_agents.episode_reward import EpisodeReward
from dovetail_agents.tool_agent import ToolAgent
from dovetail_rollouts import outcome_from
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML
from dovetail_sdk.testing.conformance import AgentLoopConformance, RewardFunctionConformance

HERE = str(Path(__file__).with_name("small_tools.py"))


def section(attribute: str) -> PluginSection:
    return PluginSection(path=HERE, attribute=attribute)


def config_of(*tools: str, **settings: Any) -> ToolAgentConfig:
    chosen = tuple(section(tool) for tool in tools or ("Arithmetic",))
    return ToolAgentConfig(name="tool_agent", tools=chosen, parser=section("Calls"), **settings)


ADD = '<call>{"name": "add", "arguments": {"a": 2, "b": 3}}</call>'


class TestToolAgent(AgentLoopConformance):
    plugin = ToolAgent
    config = config_of()
    turns = (f"Let me see. {ADD}", "5")


class TestEpisodeReward(RewardFunctionConformance):
    plugin = EpisodeReward


def call(name: str, **arguments: Any) -> str:
    return f"<call>{json.dumps({'name': name, 'arguments': arguments})}</call>"


def drawn(config: ToolAgentConfig, turns: Sequence[str], n: int = 1) -> list[Sample]:
    """Run n episodes in which the policy writes these turns."""
    members = {"plugin": ToolAgent, "config": config, "turns": tuple(turns), "__module__": __name__}
    return type("Drawn", (AgentLoopConformance,), members)().draw(n)


def shown(sample: Sample) -> list[list[str]]:
    """The results that the policy saw after each turn."""
    assert sample.trajectory is not None
    return [[str(m["content"]) for m in turn.observed] for turn in sample.trajectory.turns]


def failure_of(sample: Sample) -> Failure:
    assert isinstance(sample.outcome, Failure)
    return sample.outcome


def test_calls_are_run_at_once_and_their_results_shown_in_order() -> None:
    turn = call("add", a=1, b=1) + call("divide", a=6, b=2)
    (sample,) = drawn(config_of(), [turn, "that is it"])
    assert shown(sample) == [["2 (call 1)", "3 (call 2)"], []]
    assert sample.trajectory is not None
    assert [c["function"] for c in sample.trajectory.calls] == [
        {"name": "add", "arguments": {"a": 1, "b": 1}},
        {"name": "divide", "arguments": {"a": 6, "b": 2}},
    ]
    assert sample.trajectory.turn_rewards == (0.5, 0.0)
    assert sample.text == f"{turn}\nthat is it"


def test_a_turn_is_rendered_anew_from_what_its_parser_found() -> None:
    # The template writes calls in a form that this parser does not read.
    turn = f"Let me see. {ADD}"
    (sample,) = drawn(config_of(on_history_change="fork"), [turn, "5"])
    _, second = sample.sequences
    assert second.prompt_ids is not None
    text = template_tokenizer(CHATML).decode(second.prompt_ids.tolist())
    assert "<call>" not in text
    assert "Let me see. \n<tool_call>\n{" in text
    assert '"name": "add"' in text
    assert text.endswith("5 (call 1)\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_the_state_of_a_tool_belongs_to_one_episode() -> None:
    samples = drawn(config_of(), [ADD, ADD, "5"], n=3)
    assert [shown(s) for s in samples] == [[["5 (call 1)"], ["5 (call 2)"], []]] * 3


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        (call("divide", a=1, b=0), "error: division by zero"),
        (call("substract", a=1, b=0), "error: the function 'substract' does not exist"),
        (call("add", a="one", b=0), "error: wrong arguments of 'add'"),
        ("<call>add 1 and 1</call>", "error: 'add 1 and 1' is not a call"),
        (
            call("add", a="X", b=0).replace('"X"', "[" * 700 + "]" * 700),
            "error: the arguments of 'add'",
        ),
    ],
)
def test_what_the_policy_did_wrong_is_shown_to_it(turn: str, says: str) -> None:
    (sample,) = drawn(config_of(), [turn, "sorry"])
    assert shown(sample)[0][0].startswith(says)
    assert sample.score == 1
    assert sample.trajectory is not None
    assert json.dumps(sample.trajectory.as_json())


def test_calls_and_seconds_are_counted_by_function() -> None:
    turn = call("add", a=1, b=1) * 2 + call("divide", a=1, b=0) + call("made_up")
    (sample,) = drawn(config_of(), [turn, "<call>what</call>", "sorry"])
    assert sample.trajectory is not None
    counts = dict(sample.trajectory.counts)
    seconds = [counts.pop(f"tool_seconds/{name}") for name in ("add", "divide")]
    assert all(0 <= value < 5 for value in seconds)
    assert counts == {
        "tool_calls/add": 2,
        "tool_calls/divide": 1,
        "tool_errors": 3,
        "unreadable_calls": 1,
    }


def test_the_seconds_of_a_tool_that_hangs_are_counted() -> None:
    (sample,) = drawn(config_of("Troubles", call_seconds=0.05), [call("hang"), "so"])
    assert sample.trajectory is not None
    assert sample.trajectory.counts["tool_seconds/hang"] >= 0.04


def test_calls_beyond_the_most_of_a_turn_are_not_run() -> None:
    (sample,) = drawn(config_of(max_calls_per_turn=2), [ADD * 5, "5"])
    first, second = shown(sample)[0]
    assert first == "5 (call 1)"
    assert second == "5 (call 2)\nerror: 3 more call(s) were not run; the limit is 2 per turn"


def test_a_tool_can_end_the_episode() -> None:
    (sample,) = drawn(config_of("Troubles"), [call("finish")])
    assert sample.trajectory is not None
    assert len(sample.trajectory.turns) == 1
    assert sample.trajectory.turn_rewards == (1.0,)


def test_megabytes_are_cut() -> None:
    (sample,) = drawn(config_of("Troubles", max_observation_tokens=100), [call("talk"), "enough"])
    assert sample.score == 1
    assert len(shown(sample)[0][0]) <= 100


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("break", "tool 'break' raised ConnectionError:"),
        ("hang", "tool 'hang' took longer than 0.05 s"),
        ("late", "tool 'late' took longer than 0.05 s"),
        ("late_refusal", "tool 'late_refusal' took longer than 0.05 s"),
        ("leave", "SystemExit(3)"),
        ("nothing", "tool 'nothing' raised TypeError"),
    ],
)
def test_a_tool_that_fails_is_named_and_gives_no_score(name: str, says: str) -> None:
    config = config_of("Troubles", "Arithmetic", call_seconds=0.05)
    (sample,) = drawn(config, [call(name) + ADD, "so"])
    assert failure_of(sample).kind is FailureKind.TOOL
    assert says in failure_of(sample).message


def test_a_tool_is_tried_again() -> None:
    turns = [call("break_at_first"), "so"]
    assert failure_of(drawn(config_of("Troubles"), turns)[0]).kind is FailureKind.TOOL
    assert shown(drawn(config_of("Troubles", retries=1), turns)[0]) == [["well"], []]


def test_a_hanging_tool_is_cancelled_where_the_episode_takes_too_long() -> None:
    (sample,) = drawn(config_of("Troubles", max_seconds=0.1), [call("hang") * 3])
    assert failure_of(sample).kind is FailureKind.LIMIT


def test_two_functions_of_one_name_are_refused() -> None:
    loop = ToolAgent(config_of("Arithmetic", "Arithmetic"), PluginContext())
    with pytest.raises(PluginBrokenError, match="add"):
        loop.start()
    loop.close()


def test_the_reward_of_an_episode_is_that_of_its_turns() -> None:
    (sample,) = drawn(config_of(), [ADD, ADD, "10"])
    reward = EpisodeReward(PluginSection(name="episode"), PluginContext())
    arguments = sample.arguments()
    score = outcome_from(
        reward.compute_score(None, "", None, trajectory=arguments["trajectory"]), "episode"
    )
    assert not isinstance(score, Failure)
    assert score.value == 0.5
    assert score.turn_rewards == (0.25, 0.25, 0.0)
    rewards_T = score.on_tokens(sample)
    assert rewards_T is not None
    assert np.count_nonzero(rewards_T) == 2


def test_a_sample_without_turns_has_no_reward_of_its_episode() -> None:
    reward = EpisodeReward(PluginSection(name="episode"), PluginContext())
    with pytest.raises(ValueError, match=r"rollout\.agent_loop"):
        reward.compute_score(None, "5", None)
