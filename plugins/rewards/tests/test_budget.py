"""The budget of requests and tokens, also in the manager `naive`."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dovetail_rewards.managers.budget import Budget, Spending


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def spend(budget: Budget, clock: Clock, tokens: float) -> float:
    """Spend like `Budget.spend`, moving the clock instead of sleeping; return the time at which the request was allowed."""
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
    assert spend(budget, clock, 8) == pytest.approx(170.0)  # again two requests, 10 tokens


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


def test_waiting_for_the_budget_is_no_running_time(manager, sample, waited) -> None:
    limited = manager(lambda: 1.0, requests_per_minute=300, window=0.4)  # 2 in 0.4 s
    seconds = waited(limited, [sample(f"s{i}") for i in range(5)])
    assert seconds >= 0.3


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [(7, 7.0), ({"total_tokens": 9}, 9.0), (None, 102.0), ("many", 102.0), (-1, 102.0)],
)
def test_tokens_are_estimated_and_corrected_by_the_answers_usage(
    manager, sample, run, usage, tokens
) -> None:
    answer = {"score": 1.0} if usage is None else {"score": 1.0, "usage": usage}
    limited = manager(lambda: answer, tokens_per_minute=1e4, tokens_per_request=100)
    outcomes = run(limited, [sample(prompt="abcd", text="efgh")])
    assert outcomes["s0"].value == 1.0
    assert [spending.tokens for spending in limited.budget._spent] == [tokens]


def test_scores_from_the_cache_cost_nothing(manager, sample, run) -> None:
    def judge(solution_str):
        return 1.0

    judge.pure = True  # type: ignore[attr-defined]
    limited = manager(judge, requests_per_minute=1)
    for name in "abc":
        run(limited, [sample(name)])
    assert len(limited.budget._spent) == 1


def test_retries_spend_again(manager, sample, run) -> None:
    def down():
        raise ConnectionRefusedError("no judge")

    limited = manager(down, requests_per_minute=1e6)
    run(limited, [sample()], retries=2, backoff=0.001)
    assert len(limited.budget._spent) == 3
