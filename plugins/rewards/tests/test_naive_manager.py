"""The naive manager: every result of a function becomes a score or a failure, and a hung function blocks nothing."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.errors import ConfigError
from dovetail.interfaces import (
    Failure,
    FailureKind,
    Outcome,
    PluginContext,
    RunningTime,
    Sample,
    Score,
)
from dovetail_rewards.manager_config import NaiveConfig
from dovetail_rewards.managers.naive import NaiveManager
from dovetail_rollouts import RewardFunctions, Scorer
from dovetail_sdk.testing import FAILURES, make_sample, release_hung


def score_one(manager: NaiveManager, sample: Sample) -> Outcome:
    return asyncio.run(manager.score([sample], RunningTime()))[0]


def test_a_function_is_called_with_the_row_by_name(manager, sample) -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": 0.5, "seen": (data_source, solution_str, ground_truth, extra_info)}

    row = sample(text="t", data_source="d", ground_truth="g", extra_info={"i": 1})
    outcome = score_one(manager(compute_score), row)
    assert outcome.value == 0.5
    assert outcome.extras == {"seen": ("d", "t", "g", {"i": 1})}


async def coroutine(solution_str):
    await asyncio.sleep(0)
    return float(solution_str)


def returns_awaitable(solution_str):
    return coroutine(solution_str)


class Callable:
    def __call__(self, ground_truth, solution_str):
        return float(solution_str == ground_truth) * 4


def positional_only(_data_source=None, /, *, solution_str):
    return float(solution_str)


@pytest.mark.parametrize(
    "function",
    [
        lambda solution_str: 4,
        lambda solution_str, ground_truth: float(ground_truth),
        lambda **row: float(row["solution_str"]),
        lambda *args, solution_str, **row: 4.0 if not args and len(row) == 3 else 0.0,
        lambda solution_str, weight=2.0: 2.0 * weight,
        lambda: 4.0,
        positional_only,
        Callable(),
        coroutine,
        returns_awaitable,
    ],
)
def test_signatures_of_every_form_work(manager, sample, function) -> None:
    assert score_one(manager(function), sample(text="4")).value == 4.0


def test_a_function_that_needs_other_parameters_is_refused(manager) -> None:
    with pytest.raises(ConfigError, match=r"'solution',.*'solution_str'") as error:
        manager(lambda solution: 1.0)
    assert "def compute_score(data_source, solution_str, ground_truth" in str(error.value)


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        ({"score": 2}, 2.0),
    ],
)
def test_numbers_are_scores(manager, sample, value, score) -> None:
    outcome = score_one(manager(lambda: value), sample())
    assert isinstance(outcome.value, float)
    assert outcome.value == score


def test_numeric_extras_are_components_and_the_rest_is_kept(manager, sample) -> None:
    answer = {"score": 1.0, "acc": True, "length": 12, "pred": "4", "bad": math.nan}
    outcome = score_one(manager(lambda: answer), sample())
    assert outcome.components == {"acc": 1.0, "length": 12.0}
    assert outcome.extras["pred"] == "4"
    assert math.isnan(outcome.extras["bad"])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, "nan (float)"),
        (math.inf, "inf (float)"),
        (-math.inf, "-inf (float)"),
        (np.float32("nan"), "nan"),
        (1e300, "1e+300 (float)"),
        (10**400, "(int)"),
        ("1.0", "'1.0' (str)"),
        ("x" * 500, "..."),
        (None, "None (NoneType)"),
        ([1.0], "[1.0] (list)"),
        (np.array([1.0]), "(ndarray)"),
        (1j, "1j (complex)"),
        ({"score": math.nan}, "nan (float)"),
        ({"score": None}, "None (NoneType)"),
        ({"reward": 1.0}, "a mapping without 'score' (keys: reward)"),
        ({}, "keys: none"),
    ],
)
def test_what_is_no_finite_number_is_a_failure_that_shows_the_value(
    manager, sample, value, shown
) -> None:
    def my_reward():
        return value

    outcome = score_one(manager(my_reward), sample())
    assert outcome.kind is FailureKind.INVALID_VALUE
    assert shown in outcome.message
    assert "my_reward returned" in outcome.message
    assert not outcome.retryable
    assert len(outcome.message) < 300


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (lambda: ValueError("bad answer"), FailureKind.EXCEPTION, "ValueError: bad answer"),
        (lambda: KeyError("answer"), FailureKind.EXCEPTION, "KeyError: 'answer'"),
        (StopIteration, FailureKind.EXCEPTION, "StopIteration"),
        (lambda: SystemExit(3), FailureKind.EXCEPTION, "SystemExit(3)"),
        (KeyboardInterrupt, FailureKind.EXCEPTION, "KeyboardInterrupt"),
        (asyncio.CancelledError, FailureKind.EXCEPTION, "CancelledError"),
        (Unprintable, FailureKind.EXCEPTION, "Unprintable"),
        (lambda: ConnectionRefusedError("judge"), FailureKind.UNREACHABLE, "judge"),
        (lambda: TimeoutError("slow"), FailureKind.TIMEOUT, "slow"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_an_exception_is_a_failure_with_type_message_and_line(
    manager, sample, error, kind, text, is_async
) -> None:
    def sync():
        raise error()

    async def later():
        raise error()

    outcome = score_one(manager(later if is_async else sync), sample())
    assert outcome.kind is kind
    assert text in outcome.message
    assert outcome.retryable is (kind is not FailureKind.EXCEPTION)
    if not isinstance(error(), asyncio.CancelledError):
        line = (later if is_async else sync).__code__.co_firstlineno + 1
        assert f"test_naive_manager.py, line {line}" in outcome.message


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("is_async", [False, True])
def test_a_process_that_a_function_forks_ends(manager, sample, is_async) -> None:
    children = []

    def sync():
        children.append(os.fork())
        return 0.5

    async def later():
        return sync()

    assert score_one(manager(later if is_async else sync), sample()).value == 0.5
    [child] = children
    end = time.monotonic() + 20
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            raise AssertionError("the child was still running")
        time.sleep(0.01)


def test_the_line_is_the_users_own_and_not_the_librarys(manager, sample) -> None:
    def my_reward(ground_truth):
        import json

        return json.loads(ground_truth)

    outcome = score_one(manager(my_reward), sample(ground_truth="{"))
    line = my_reward.__code__.co_firstlineno + 3
    assert f"(test_naive_manager.py, line {line}, in my_reward)" in outcome.message


def test_each_source_has_its_function(manager, sample) -> None:
    naive = manager({"a": lambda: 1.0, "b": lambda: 2.0})
    samples = [sample(data_source="b"), sample(data_source="a")]
    outcomes = asyncio.run(naive.score(samples, RunningTime()))
    assert [o.value for o in outcomes] == [2.0, 1.0]
    outcome = score_one(naive, sample(data_source="c"))
    assert isinstance(outcome, Failure)
    assert "'c' has no reward function; functions exist for: a, b" in outcome.message


def test_a_manager_without_functions_says_so() -> None:
    with pytest.raises(ConfigError, match="naive"):
        NaiveManager(NaiveConfig(), PluginContext()).start()


def hangs(solution_str):
    if solution_str == "hang":
        FAILURES["hang"]()
    return 1.0


async def blocks_its_loop(solution_str):
    if solution_str == "hang":
        FAILURES["hang"]()
    return 1.0


async def waits_for_ever(solution_str):
    if solution_str == "hang":
        await asyncio.Event().wait()
    return 1.0


@pytest.mark.parametrize(
    "function",
    [hangs, blocks_its_loop, waits_for_ever],
)
def test_a_hung_function_is_a_timeout_and_others_go_on(manager, sample, run, function) -> None:
    naive = manager(function, workers=2)
    good = [sample(f"good{i}", "fine") for i in range(6)]
    before = run(naive, good[:1])
    hung = run(naive, [sample("hung", "hang")], timeout=7.0, hang=1)
    assert hung["hung"].kind is FailureKind.TIMEOUT
    assert "within 7 s" in hung["hung"].message
    time.sleep(0.6)  # an event loop counts as blocked after half a second
    after = run(naive, good)
    assert all(isinstance(outcome, Score) for outcome in (before | after).values())


def test_hung_calls_are_bounded_and_come_back(manager, sample, run) -> None:
    naive = manager(hangs, workers=2, max_hung=3)
    first = run(naive, [sample(f"h{i}", "hang") for i in range(3)], hang=3)
    assert {o.kind for o in first.values()} == {FailureKind.TIMEOUT}
    assert naive._calls.hung == 3
    refused = run(naive, [sample("late", "fine")])["late"]
    assert refused.kind is FailureKind.CRASH
    assert "max_hung=3" in refused.message
    deadline = time.monotonic() + 60.0
    while naive._calls.hung and time.monotonic() < deadline:
        release_hung()  # repeat: on a busy machine, a call may begin to hang late
        time.sleep(0.01)
    assert run(naive, [sample("again", "fine")])["again"].value == 1.0


def test_waiting_for_a_free_worker_is_no_timeout(manager, sample, run, clock) -> None:
    def takes_long():
        clock.ahead += 200.0
        return 1.0

    outcomes = run(manager(takes_long, workers=1), [sample(f"s{i}") for i in range(5)], timeout=300)
    assert [o.value for o in outcomes.values()] == [1.0] * 5


def test_a_client_kept_between_calls_lives_through_several_loops(manager, sample, run) -> None:
    loops = []

    async def compute_score():
        loops.append(asyncio.get_running_loop())
        return 1.0

    naive = manager(compute_score)
    run(naive, [sample("a")])
    run(naive, [sample("b")])
    assert loops[0] is loops[1]


def test_a_hung_function_does_not_keep_the_process_alive() -> None:
    script = """
import asyncio, sys, time
from dovetail_rollouts.scoring.scorer import Scorer
from dovetail.interfaces import PluginContext
from dovetail_sdk.testing import make_sample
from dovetail_rollouts import RewardFunctions
from dovetail_rewards.manager_config import NaiveConfig
from dovetail_rewards.managers.naive import NaiveManager

async def main():
    functions = RewardFunctions(default=lambda: time.sleep(600))
    scorer = Scorer(NaiveManager(NaiveConfig(), PluginContext(reward_functions=functions)), timeout=0.1)
    scorer.add(make_sample("s"), group=0, group_size=1)
    return (await scorer.finish())["s"]

sys.stdout.write(asyncio.run(main()).kind)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "timeout"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["score", "acc", "x"]), inner, max_size=3)
    ),
    max_leaves=4,
)


@given(values=st.lists(anything | st.sampled_from(sorted(set(FAILURES) - {"hang"})), max_size=12))
def test_no_failure_ever_becomes_a_number(values) -> None:
    """A function's result gives a score only if it contains a finite number."""

    def compute_score(extra_info):
        value = extra_info["value"]
        return FAILURES[value]() if isinstance(value, str) and value in FAILURES else value

    functions = RewardFunctions(default=compute_score)
    naive = NaiveManager(NaiveConfig(), PluginContext(reward_functions=functions))
    samples = [make_sample(f"s{i}", extra_info={"value": value}) for i, value in enumerate(values)]

    async def main() -> dict[str, Outcome]:
        scorer = Scorer(naive, timeout=30.0, concurrency=8)
        for sample in samples:
            scorer.add(sample, group=sample.sample_id, group_size=1)
        return await scorer.finish()

    outcomes = asyncio.run(main())
    naive.close()
    for sample in samples:
        value, outcome = sample.prompt.extra_info["value"], outcomes[sample.sample_id]
        number = value.get("score") if isinstance(value, dict) else value
        sound = isinstance(number, (bool, int, float)) and abs(number) < 3.4e38
        assert isinstance(outcome, Score if sound else Failure)
        if sound:
            assert outcome.value == float(number)
            assert all(math.isfinite(part) for part in outcome.components.values())
