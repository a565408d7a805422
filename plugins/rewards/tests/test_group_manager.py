"""The group manager: lists over a group, and scores from comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.interfaces import FailureKind, PluginContext, RunningTime
from dovetail_rewards.manager_config import GroupConfig
from dovetail_rewards.managers.group import GroupManager
from dovetail_rollouts import RewardFunctions
from dovetail_sdk.testing import make_sample


@pytest.fixture
def group(started: Any) -> Callable[..., GroupManager]:
    return lambda function=None, **config: started(GroupManager, GroupConfig(**config), function)


def values(outcomes: dict[str, Any]) -> list[float | None]:
    return [getattr(outcome, "value", None) for outcome in outcomes.values()]


def test_a_function_on_lists_sees_whole_groups(group, sample, run) -> None:
    calls = []

    def ranks(solution_strs):
        calls.append(list(solution_strs))
        order = sorted(solution_strs, key=len)
        return [float(order.index(text)) for text in solution_strs]

    ranks.unit = "group"  # type: ignore[attr-defined]
    samples = [sample(f"s{i}", text) for i, text in enumerate(["aaa", "a", "aa", "b", "bb"])]
    assert values(run(group(ranks), samples, groups=[3, 2])) == [2.0, 0.0, 1.0, 0.0, 1.0]
    # Groups are scored concurrently, so either may be called first.
    assert sorted(calls) == [["aaa", "a", "aa"], ["b", "bb"]]


def test_a_score_is_the_mean_over_comparisons(group, sample, run) -> None:
    def compare(solution_a, solution_b, ground_truth, prompt):
        assert ground_truth == "4"
        assert prompt == "2 + 2 ="
        return len(solution_a) > len(solution_b)

    samples = [sample(f"s{i}", text) for i, text in enumerate(["a", "aaa", "aa"])]
    assert values(run(group(compare), samples, groups=[3])) == [0.0, 1.0, 0.5]


def test_a_judge_that_always_prefers_the_first_prefers_nobody_in_both_orders(
    group, sample, run
) -> None:
    def first_wins(solution_a, solution_b):
        return 1.0

    samples = [sample(f"s{i}") for i in range(3)]
    assert values(run(group(first_wins), samples, groups=[3])) == [0.5, 0.5, 0.5]
    one_order = run(group(first_wins, both_orders=False), samples, groups=[3])
    assert values(one_order) == [1.0, 0.5, 0.0]


def test_a_failed_comparison_fails_its_two_and_no_other(group, sample, run) -> None:
    def compare(solution_a, solution_b):
        if {solution_a, solution_b} == {"x", "y"}:
            raise ValueError("can't tell")
        return 0.5

    samples = [sample(f"s{i}", text) for i, text in enumerate("xyz")]
    outcomes = run(group(compare), samples, groups=[3])
    assert values(outcomes) == [None, None, 0.5]
    assert "can't tell" in outcomes["s0"].message


@pytest.mark.parametrize("answer", [1.5, -0.1, float("nan"), None, "a"])
def test_a_comparison_beyond_0_to_1_is_invalid(group, sample, run, answer) -> None:
    outcomes = run(
        group(lambda solution_a, solution_b: answer), [sample("a"), sample("b")], groups=[2]
    )
    assert {outcome.kind for outcome in outcomes.values()} == {FailureKind.INVALID_VALUE}


def test_one_response_alone_has_nothing_to_compare_with(group, sample, run) -> None:
    outcome = run(group(lambda solution_a, solution_b: 1.0), [sample()])["s0"]
    assert outcome.kind is FailureKind.INVALID_VALUE


def test_a_call_that_raises_fails_its_group_alone(group, sample, run) -> None:
    def picky(solution_strs):
        if "bad" in solution_strs:
            raise ValueError("bad one")
        return [1.0] * len(solution_strs)

    samples = [sample(f"s{i}", text) for i, text in enumerate(["ok", "bad", "ok", "ok"])]
    assert values(run(group(picky), samples, groups=[2, 2])) == [None, None, 1.0, 1.0]


def test_different_functions_in_a_group_are_a_failure(group, sample, run) -> None:
    manager = group(function={"a": lambda: 1.0, "b": lambda: 2.0})
    samples = [sample("x", data_source="a"), sample("y", data_source="b")]
    outcomes = run(manager, samples, groups=[2])
    assert all("different data sources" in outcome.message for outcome in outcomes.values())


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=5, max_size=5), min_size=5, max_size=5),
    st.integers(2, 5),
    st.booleans(),
)
def test_scores_equal_a_plain_loop(preferences, count, both) -> None:
    import asyncio

    def compare(solution_a, solution_b):
        return preferences[int(solution_a)][int(solution_b)]

    functions = RewardFunctions(default=compare)
    manager = GroupManager(GroupConfig(both_orders=both), PluginContext(reward_functions=functions))
    samples = [make_sample(f"s{i}", str(i)) for i in range(count)]
    outcomes = asyncio.run(manager.score(samples, RunningTime()))
    manager.close()
    for i, outcome in enumerate(outcomes):
        parts = []
        for j in range(count):
            if i == j:
                continue
            low, high = min(i, j), max(i, j)
            p = preferences[low][high]
            if both:
                p = 0.5 * (p + 1 - preferences[high][low])
            parts.append(p if i == low else 1 - p)
        np.testing.assert_allclose(outcome.value, np.mean(parts), atol=1e-12)
