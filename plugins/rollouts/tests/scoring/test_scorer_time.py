"""The scorer's time-outs and retries: which time counts, and which failures are retried."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dovetail.interfaces import FailureKind, RunningTime, Score
from dovetail_rollouts import Scorer


def test_a_unit_that_hangs_times_out_and_is_counted(scripted) -> None:
    manager = scripted.Manager(
        lambda samples, *_: (
            scripted.hang() if samples[0].sample_id == "b" else scripted.ones(samples)
        )
    )
    outcomes, _ = scripted.run(manager, ["a", "b", "c"], timeout=0.05)
    assert scripted.took == pytest.approx(0.05)
    assert outcomes["b"].kind is FailureKind.TIMEOUT
    assert outcomes["b"].message == "reward manager 'scripted' returned no outcome within 0.05 s"
    assert outcomes["a"].value == outcomes["c"].value == 1.0


def test_waiting_for_a_place_does_not_count_as_running(scripted) -> None:
    async def slow(samples: Any) -> Any:
        await asyncio.sleep(0.05)
        return scripted.ones(samples)

    outcomes, _ = scripted.run(
        scripted.Manager(lambda samples, *_: slow(samples)),
        list("abcdef"),
        timeout=0.15,
        concurrency=1,
    )
    assert len(outcomes) == 6


def test_what_the_manager_marks_as_waiting_does_not_count(scripted) -> None:
    limits = []

    async def queued(samples: Any, time: RunningTime) -> Any:
        limits.append(time.limit)
        await asyncio.sleep(0.05)
        with time.waiting():
            await asyncio.sleep(0.3)
        await asyncio.sleep(0.02)
        return scripted.ones(samples)

    manager = scripted.Manager(lambda samples, _, time: queued(samples, time))
    outcomes, _ = scripted.run(manager, ["a", "b"], timeout=0.2)
    assert [outcome.value for outcome in outcomes.values()] == [1.0, 1.0]
    assert limits == [0.2, 0.2]


def test_running_counts_again_after_waiting(scripted) -> None:
    async def hangs_later(samples: Any, time: RunningTime) -> Any:
        with time.waiting():
            await asyncio.sleep(0.1)
        await asyncio.Event().wait()

    outcomes, _ = scripted.run(
        scripted.Manager(lambda samples, _, time: hangs_later(samples, time)), ["a"], timeout=0.1
    )
    assert outcomes["a"].kind is FailureKind.TIMEOUT
    assert scripted.took == pytest.approx(0.2)


def test_time_counts_again_only_when_no_sample_of_the_group_waits(scripted) -> None:
    async def one(time: RunningTime, seconds: float) -> None:
        with time.waiting():
            await asyncio.sleep(seconds)

    async def group(samples: Any, time: RunningTime) -> Any:
        await asyncio.gather(*(one(time, seconds) for seconds in (0.05, 0.3)))
        return scripted.ones(samples)

    manager = scripted.Manager(lambda samples, _, time: group(samples, time), unit="group")
    outcomes, _ = scripted.run(manager, ["a0", "a1"], group_size=2, timeout=0.1)
    assert [outcome.value for outcome in outcomes.values()] == [1.0, 1.0]


def test_a_late_answer_is_late_even_where_the_manager_swallows_its_cancellation(scripted) -> None:
    async def stubborn(samples: Any) -> Any:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return scripted.ones(samples)

    outcomes, _ = scripted.run(
        scripted.Manager(lambda samples, *_: stubborn(samples)), ["a"], timeout=0.05
    )
    assert outcomes["a"].kind is FailureKind.TIMEOUT


def test_retryable_failures_are_tried_again(scripted) -> None:
    manager = scripted.Manager(
        lambda samples, n, _: [scripted.failure(True)] if n < 3 else scripted.ones(samples)
    )
    outcomes, _ = scripted.run(manager, ["a"], retries=2)
    assert outcomes["a"].value == 1.0
    assert len(manager.calls) == 3


def test_retries_end(scripted) -> None:
    manager = scripted.Manager(lambda *_: [scripted.failure(True)])
    outcomes, _ = scripted.run(manager, ["a"], retries=2)
    assert outcomes["a"] == scripted.failure(True)
    assert len(manager.calls) == 3


def test_other_failures_are_not_tried_again(scripted) -> None:
    manager = scripted.Manager(lambda *_: [scripted.failure(False)])
    scripted.run(manager, ["a"], retries=5)
    assert len(manager.calls) == 1


def test_a_time_out_is_tried_again(scripted) -> None:
    manager = scripted.Manager(
        lambda samples, n, _: scripted.hang() if n == 1 else scripted.ones(samples)
    )
    outcomes, _ = scripted.run(manager, ["a"], timeout=0.05, retries=1)
    assert outcomes["a"].value == 1.0


def test_a_retried_group_is_judged_by_its_last_try_alone(scripted) -> None:
    tries = [[Score(value=1.0), scripted.failure(True)], [Score(value=5.0), Score(value=6.0)]]
    manager = scripted.Manager(lambda _, n, time: tries[n - 1], unit="group")
    outcomes, _ = scripted.run(manager, ["a0", "a1"], group_size=2, retries=1)
    assert [outcome.value for outcome in outcomes.values()] == [5.0, 6.0]


def test_it_counts_the_seconds_in_which_at_least_one_sample_is_scored(scripted) -> None:
    async def slow(samples: Any) -> Any:
        await asyncio.sleep(3.0)
        return scripted.ones(samples)

    async def main() -> float:
        scorer = Scorer(scripted.Manager(lambda samples, *_: slow(samples)), timeout=5.0)
        scorer.add(scripted.sample("a"), group=0, group_size=1)
        await asyncio.sleep(2.0)
        scorer.add(scripted.sample("b"), group=0, group_size=1)
        await asyncio.sleep(4.0)
        scorer.add(scripted.sample("c"), group=0, group_size=1)
        await asyncio.sleep(1.0)
        await scorer.finish()
        return scorer.busy.seconds

    # busy from 0 to 5 and from 6 to 9
    assert scripted.until_done(main()) == pytest.approx(8.0)
