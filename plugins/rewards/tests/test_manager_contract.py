"""Reward functions that users may write: with numbers, mappings, awaitables, lists, pairs or token rewards; pure functions."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.errors import ConfigError
from dovetail.interfaces import Failure, FailureKind, RunningTime, Sample, Score
from dovetail_rewards.managers.cache import OutcomeCache
from dovetail_rollouts import RewardCall, outcome_from, outcomes_from
from dovetail_sdk.testing import make_sample


def score_one(manager: Any, sample: Sample) -> Any:
    return asyncio.run(manager.score([sample], RunningTime()))[0]


def on_lists(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(s == t) for s, t in zip(solution_strs, ground_truths, strict=True)]


def compute_reward(completions, answers):
    return [float(c == a) for c, a in zip(completions, answers, strict=True)]


async def later_on_lists(responses, ground_truths):
    return np.array([float(r == t) for r, t in zip(responses, ground_truths, strict=True)])


@pytest.mark.parametrize("function", [on_lists, compute_reward, later_on_lists])
def test_functions_on_lists_are_known_by_their_parameters(manager, sample, function) -> None:
    call = RewardCall(function)
    assert call.form == "list"
    assert score_one(manager(function), sample(text="4")).value == 1.0
    assert score_one(manager(function), sample(text="5")).value == 0.0


def test_parameters_of_lists_are_filled_in_order(sample) -> None:
    seen: dict[str, Any] = {}

    def compute_score(solution_strs, prompts, finish_reasons, **rest):
        seen.update(rest, solution_strs=solution_strs, prompts=prompts, ends=finish_reasons)
        return [0.0, 1.0]

    rows = [
        sample("a", "x", data_source="d"),
        sample("b", "y", response_ids=np.arange(1), finish_reason="length"),
    ]
    RewardCall(compute_score).on_list(rows)
    assert seen == {
        "solution_strs": ["x", "y"],
        "prompts": ["2 + 2 ="] * 2,
        "ends": ["stop", "length"],
        "data_sources": ["d", None],
        "ground_truths": ["4", "4"],
        "extra_infos": [None, None],
    }


def test_a_list_function_that_needs_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="'truths'") as error:
        RewardCall(lambda solution_strs, truths: [])
    assert "def compute_score(data_sources, solution_strs, ground_truths" in str(error.value)


def test_a_function_may_ask_for_the_prompt_and_the_tokens(manager, sample) -> None:
    def compute_score(prompt, response_ids, finish_reason):
        return len(response_ids) * (finish_reason == "length") * len(prompt)

    row = sample(response_ids=np.arange(5), finish_reason="length", prompt="abc")
    assert score_one(manager(compute_score), row).value == 15.0


def test_token_rewards_sum_to_the_score(manager, sample) -> None:
    outcome = score_one(manager(lambda: {"token_rewards": [0.5, 0, 1], "acc": 1}), sample())
    assert outcome.value == 1.5
    assert outcome.token_rewards.dtype == np.float32
    assert outcome.token_rewards.tolist() == [0.5, 0.0, 1.0]
    assert outcome.components == {"acc": 1.0}


@pytest.mark.parametrize("rewards", [[0.5, math.nan], ["1"], 3.0, np.ones((2, 2)), "ab"])
def test_token_rewards_that_are_none_fail_the_sample(manager, sample, rewards) -> None:
    outcome = score_one(manager(lambda: {"score": 1.0, "token_rewards": rewards}), sample())
    assert outcome.kind is FailureKind.INVALID_VALUE
    assert "token_rewards = " in outcome.message


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1.0], "returned 1 rewards for 2 samples;"),
        ([1.0] * 3, "returned 3 rewards for 2 samples"),
        (1.0, "returned 1.0 (float) for 2 samples;"),
        ("ab", "'ab' (str)"),
        (None, "None (NoneType)"),
        ({0: 1.0, 1: 2.0}, "(dict)"),
        (np.ones((2, 1)), "(ndarray)"),
        ({1.0, 2.0}, "(set)"),
    ],
)
def test_a_result_that_is_no_list_of_that_length_fails_them_all(value, text) -> None:
    outcomes = outcomes_from(value, 2, "mine")
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert isinstance(outcome, Failure)
        assert outcome.kind is FailureKind.INVALID_VALUE
        assert text in outcome.message


entries = st.one_of(
    st.floats(),
    st.integers(),
    st.none(),
    st.text(max_size=2),
    st.builds(lambda v: {"score": v}, st.floats()),
)


@given(st.lists(entries, max_size=8))
def test_each_entry_is_judged_as_if_alone(values) -> None:
    outcomes = outcomes_from(values, len(values), "mine")
    for value, outcome in zip(values, outcomes, strict=True):
        alone = outcome_from(value, "mine")
        assert type(outcome) is type(alone)
        if isinstance(outcome, Score):
            assert outcome.value == alone.value


def test_a_function_on_groups_is_refused_by_managers_of_single_samples(manager, sample) -> None:
    def ranks(solution_strs):
        return [1.0]

    ranks.unit = "group"  # type: ignore[attr-defined]
    for function in (ranks, lambda solution_a, solution_b: 1.0):
        outcome = score_one(manager(function), sample())
        assert outcome.kind is FailureKind.EXCEPTION
        assert "set reward.manager.name=group" in outcome.message


def counted(pure: bool) -> tuple[Any, list[str]]:
    calls: list[str] = []

    def compute_score(solution_str, extra_info):
        calls.append(solution_str)
        return 1.0 if solution_str != "bad" else None

    if pure:
        compute_score.pure = True  # type: ignore[attr-defined]
    return compute_score, calls


@pytest.mark.parametrize("pure", [True, False])
def test_pure_functions_are_called_once_for_the_same_content(manager, sample, pure) -> None:
    function, calls = counted(pure)
    naive = manager(function)
    for name, text, info in (("a", "x", {"k": 1}), ("b", "x", {"k": 1}), ("c", "x", {"k": 2})):
        outcome = score_one(naive, sample(name, text, extra_info=info, ground_truth=name))
        assert outcome.value == 1.0
    assert len(calls) == (2 if pure else 3)


def test_failures_are_not_kept(manager, sample) -> None:
    function, calls = counted(True)
    naive = manager(function)
    for _ in range(2):
        assert isinstance(score_one(naive, sample(text="bad")), Failure)
    assert calls == ["bad", "bad"]


def test_the_cache_forgets_what_was_not_used(sample) -> None:
    call = RewardCall(counted(True)[0])
    cache = OutcomeCache(2)
    keys = [cache.key(call, sample(text=text)) for text in "abc"]
    for key in keys[:2]:
        cache.put(key, Score(value=1.0))
    assert cache.get(keys[0]) is not None
    cache.put(keys[2], Score(value=1.0))
    assert cache.get(keys[1]) is None
    assert cache.get(keys[0]) is not None
    assert OutcomeCache(0).key(call, sample()) is None


@given(
    st.tuples(*[st.text(max_size=3) | st.integers() | st.floats() | st.booleans()] * 2),
)
def test_different_contents_have_different_keys(pair) -> None:
    call = RewardCall(counted(True)[0])
    cache = OutcomeCache(4)
    first, second = (cache.key(call, make_sample("s", extra_info={"k": x})) for x in pair)
    assert (first == second) == (repr(pair[0]) == repr(pair[1]))


def test_contents_that_cannot_be_told_apart_are_not_kept(sample) -> None:
    cache = OutcomeCache(4)
    call = RewardCall(counted(True)[0])
    assert cache.key(call, sample(extra_info={"object": object()})) is None
    arrays = [cache.key(call, sample(extra_info={"a": np.array([x])})) for x in (1, 2, 1.0)]
    assert len({*arrays, None}) == 4
