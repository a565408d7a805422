"""The budget of requests and tokens, and the manager that keeps to it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dovetail.interfaces import FailureKind, PluginContext, RewardFunctions
from dovetail_rewards.manager_config import RateLimitedConfig
from dovetail_rewards.managers.budget import Budget, Spending
from dovetail_rewards.managers.rate_limited import RateLimitedManager


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def spend(budget: Budget, clock: Clock, tokens: float) -> float:
    """Spend as `Budget.spend` does, with the clock moved in place of sleeping; when it was granted."""
    while (nap := budget.wait(tokens)) > 0:
        clock.now += nap
    budget._spent.append(Spending(clock.now, tokens))
    return clock.now


@given(
    requests=st.none() | st.integers(1, 20),
    tokens=st.none() | st.integers(1, 100),
    wanted=st.lists(st.tuples(st.integers(0, 60), st.floats(0, 30)), max_size=40),
)
def test_no_window_holds_more_than_the_budget(requests, tokens, wanted) -> None:
    clock = Clock()
    budget = Budget(requests, tokens, clock=clock)
    granted: list[tuple[float, int]] = []
    for amount, pause in wanted:
        clock.now += pause
        granted.append((spend(budget, clock, amount), amount))
    for i, (end, _) in enumerate(granted):
        window = [amount for at, amount in granted[: i + 1] if at > end - 60.0]
        if requests is not None:
            assert len(window) <= requests
        if tokens is not None:
            assert sum(window) <= tokens or len(window) == 1


def test_it_waits_no_longer_than_it_must() -> None:
    clock = Clock()
    budget = Budget(2, 10, clock=clock)
    assert spend(budget, clock, 6) == 100.0
    clock.now = 110.0
    assert spend(budget, clock, 4) == 110.0
    assert spend(budget, clock, 1) == pytest.approx(
        160.0
    )  # when the first request leaves the window
    assert spend(budget, clock, 8) == pytest.approx(170.0)  # two requests and 10 tokens again


def test_corrected_tokens_count() -> None:
    clock = Clock()
    budget = Budget(None, 10, clock=clock)
    spending = Spending(clock.now, 10)
    budget._spent.append(spending)
    assert budget.wait(5) == pytest.approx(60.0)
    spending.tokens = 3
    assert budget.wait(5) == 0.0


def test_a_shorter_window_cuts_the_budget_in_proportion() -> None:
    clock = Clock()
    budget = Budget(60, None, window=2.0, clock=clock)
    assert [spend(budget, clock, 0) for _ in range(4)] == pytest.approx([100, 100, 102, 102])


def limited(function: Any, **config: Any) -> RateLimitedManager:
    functions = RewardFunctions(default=function)
    manager = RateLimitedManager(
        RateLimitedConfig(**config), PluginContext(reward_functions=functions)
    )
    manager.start()
    return manager


def test_waiting_for_the_budget_is_no_running_time(sample, waited) -> None:
    manager = limited(lambda: 1.0, requests_per_minute=300, window=0.4)  # 2 in 0.4 s
    seconds = waited(manager, [sample(f"s{i}") for i in range(5)])
    manager.close()
    assert seconds >= 0.3


def test_a_call_that_hangs_is_one_all_the_same(sample, run) -> None:
    release = threading.Event()
    manager = limited(lambda: release.wait(60.0), requests_per_minute=600)
    outcome = run(manager, [sample()], hang=1)["s0"]
    release.set()
    manager.close()
    assert outcome.kind is FailureKind.TIMEOUT


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [(7, 7.0), ({"total_tokens": 9}, 9.0), (None, 102.0), ("many", 102.0), (-1, 102.0)],
)
def test_tokens_are_estimated_and_corrected_by_the_answers_usage(
    sample, run, usage, tokens
) -> None:
    answer = {"score": 1.0} if usage is None else {"score": 1.0, "usage": usage}
    manager = limited(lambda: answer, tokens_per_minute=1e4, tokens_per_request=100)
    outcomes = run(manager, [sample(prompt="abcd", text="efgh")])
    manager.close()
    assert outcomes["s0"].value == 1.0
    assert [spending.tokens for spending in manager.budget._spent] == [tokens]


def test_concurrency_is_part_of_the_budget(sample, run) -> None:
    running = most = 0
    three = asyncio.Event()

    async def judge():
        nonlocal running, most
        running += 1
        most = max(most, running)
        if most == 3:
            three.set()
        await three.wait()
        await asyncio.sleep(0.02)
        running -= 1
        return 1.0

    manager = limited(judge, workers=3)
    run(manager, [sample(f"s{i}") for i in range(12)])
    manager.close()
    assert most == 3


def test_scores_from_the_cache_cost_nothing(sample, run) -> None:
    def judge(solution_str):
        return 1.0

    judge.pure = True  # type: ignore[attr-defined]
    manager = limited(judge, requests_per_minute=1)
    for name in "abc":
        run(manager, [sample(name)])
    manager.close()
    assert len(manager.budget._spent) == 1


def test_retries_spend_again(sample, run) -> None:
    def down():
        raise ConnectionRefusedError("no judge")

    manager = limited(down, requests_per_minute=1e6)
    run(manager, [sample()], retries=2, backoff=0.001)
    manager.close()
    assert len(manager.budget._spent) == 3
