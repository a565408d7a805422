"""The batch manager: when and with which samples it calls a function, and the effect of a failed call."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.interfaces import Failure, FailureKind, PluginContext, RunningTime, Sample, Score
from dovetail_rewards.manager_config import BatchConfig
from dovetail_rewards.managers.batch import BatchManager
from dovetail_rollouts import RewardFunctions, Scorer
from dovetail_sdk.testing import make_sample


@pytest.fixture
def batch(started: Any) -> Callable[..., BatchManager]:
    return lambda function=None, **config: started(BatchManager, BatchConfig(**config), function)


class Lists:
    """A function on lists that records its calls; it returns 1.0 for each text, or the result of `answer`."""

    def __init__(self, answer: Any = None) -> None:
        self.calls: list[list[str]] = []
        self.answer = answer or (lambda texts: [float(text) for text in texts])

    def __call__(self, solution_strs):
        self.calls.append(list(solution_strs))
        return self.answer(solution_strs)


def rows(sample: Any, texts: Any, **fields: Any) -> list[Sample]:
    return [sample(f"s{i}", str(text), **fields) for i, text in enumerate(texts)]


def test_full_batches_are_called_at_once_and_the_rest_after_a_wait(batch, sample, run) -> None:
    lists = Lists()
    began = time.monotonic()
    outcomes = run(batch(lists, size=4, wait_ms=100), rows(sample, range(10)))
    assert time.monotonic() - began >= 0.1
    assert [len(call) for call in lists.calls] == [4, 4, 2]
    assert [o.value for o in outcomes.values()] == [float(i) for i in range(10)]


def test_samples_gather_while_a_call_runs(batch, sample) -> None:
    release, entered = threading.Event(), threading.Event()

    def slow(texts):
        entered.set()
        release.wait(120.0)
        return [1.0] * len(texts)

    lists = Lists(slow)

    async def main() -> Any:
        scorer = Scorer(batch(lists, size=8, wait_ms=1), timeout=30.0)
        samples = rows(sample, range(6))
        scorer.add(samples[0], group=0, group_size=1)
        await asyncio.to_thread(entered.wait, 120.0)
        for one in samples[1:]:
            scorer.add(one, group=one.sample_id, group_size=1)
            await asyncio.sleep(0.005)
        release.set()
        return await scorer.finish()

    assert all(isinstance(outcome, Score) for outcome in asyncio.run(main()).values())
    assert [len(call) for call in lists.calls] == [1, 5]


def test_waiting_for_others_does_not_count_as_running(batch, sample, watched) -> None:
    time, counted = watched(), []

    def lists(solution_strs):
        counted.append(time.counts)
        return [1.0] * len(solution_strs)

    async def main() -> Any:
        manager = batch(lists, size=8, wait_ms=1)
        scoring = asyncio.ensure_future(manager.score([sample()], time))
        await asyncio.sleep(0)
        counted.append(time.counts)
        return await scoring

    assert asyncio.run(main())[0].value == 1.0
    assert counted == [False, True]


def test_a_call_that_takes_too_long_is_a_timeout_of_its_samples_alone(batch, sample, run) -> None:
    release = threading.Event()

    def slow(texts):
        if "0" in texts:
            release.wait(60.0)
        return [1.0] * len(texts)

    manager = batch(Lists(slow), size=2, wait_ms=1, calls=2)
    outcomes = run(manager, rows(sample, range(4)), hang=2)
    release.set()
    kinds = [getattr(outcome, "kind", None) for outcome in outcomes.values()]
    assert kinds == [FailureKind.TIMEOUT, FailureKind.TIMEOUT, None, None]


def test_where_a_call_raises_only_the_culprits_fail(batch, sample, run) -> None:
    def picky(texts):
        if bad := [text for text in texts if text in ("3", "6")]:
            raise ValueError(f"can't read {bad}")
        return [1.0] * len(texts)

    lists = Lists(picky)
    outcomes = run(batch(lists, size=8, wait_ms=1), rows(sample, range(8)))
    failed = {name for name, outcome in outcomes.items() if isinstance(outcome, Failure)}
    assert failed == {"s3", "s6"}
    assert "can't read ['3']" in outcomes["s3"].message
    assert len(lists.calls) < 2 * 8
    whole = run(batch(Lists(picky), size=8, wait_ms=1, split=False), rows(sample, range(8)))
    assert {outcome.kind for outcome in whole.values()} == {FailureKind.EXCEPTION}


def test_a_service_that_is_down_is_asked_once(batch, sample, run) -> None:
    def down(texts):
        raise ConnectionRefusedError("nobody")

    lists = Lists(down)
    outcomes = run(batch(lists, size=8, wait_ms=1), rows(sample, range(8)))
    assert {outcome.kind for outcome in outcomes.values()} == {FailureKind.UNREACHABLE}
    assert all(outcome.retryable for outcome in outcomes.values())
    assert len(lists.calls) == 1


@pytest.mark.parametrize("change", [-1, 1])
def test_a_result_of_the_wrong_length_fails_its_call_and_no_other(
    batch, sample, run, change
) -> None:
    def wrong(texts):
        return [1.0] * (len(texts) + (change if "0" in texts else 0))

    outcomes = run(batch(Lists(wrong), size=4, wait_ms=1), rows(sample, range(8)))
    kinds = [getattr(outcome, "kind", None) for outcome in outcomes.values()]
    assert kinds == [FailureKind.INVALID_VALUE] * 4 + [None] * 4


def test_each_function_has_calls_of_its_own(batch, sample, run) -> None:
    first, second = Lists(), Lists()
    manager = batch(function={"a": first, "b": second}, size=2, wait_ms=1)
    samples = [sample(f"s{i}", str(i), data_source="ab"[i % 2]) for i in range(8)]
    outcomes = run(manager, samples)
    assert [o.value for o in outcomes.values()] == [float(i) for i in range(8)]
    assert first.calls == [["0", "2"], ["4", "6"]]
    assert second.calls == [["1", "3"], ["5", "7"]]


def test_a_rollout_that_is_given_up_calls_nothing_more(batch, sample, monkeypatch) -> None:
    lists = Lists()

    async def main() -> None:
        scorer = Scorer(batch(lists, size=8, wait_ms=600_000), timeout=3600.0)
        for one in rows(sample, range(3)):
            scorer.add(one, group=0, group_size=1)
        await asyncio.sleep(0.01)
        await scorer.cancel()
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + 1000.0)  # all timers are due
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert lists.calls == []


def test_a_call_that_is_given_up_before_it_begins_frees_its_place(batch, sample, run) -> None:
    manager = batch(Lists(), size=1, wait_ms=0)

    async def main() -> None:
        for one in rows(sample, range(4)):
            scoring = asyncio.ensure_future(manager.score([one], RunningTime()))
            await asyncio.sleep(0)
            scoring.cancel()
            await asyncio.gather(scoring, return_exceptions=True)

        scoring = manager.score([sample(text="7")], RunningTime())
        assert [o.value for o in await asyncio.wait_for(scoring, 120.0)] == [7.0]

    asyncio.run(main())


values = st.one_of(st.floats(), st.none(), st.text(max_size=2), st.booleans(), st.just("raise"))


@given(values=st.lists(values, max_size=12), size=st.integers(1, 5), calls=st.integers(1, 3))
def test_whatever_the_function_does_each_sample_has_its_own_outcome(values, size, calls) -> None:
    def answer(extra_infos):
        picked = [info["value"] for info in extra_infos]
        if "raise" in picked:
            raise ValueError("one of them")
        return picked

    functions = RewardFunctions(default=answer)
    config = BatchConfig(size=size, calls=calls, wait_ms=1)
    manager = BatchManager(config, PluginContext(reward_functions=functions))
    samples = [make_sample(f"s{i}", extra_info={"value": value}) for i, value in enumerate(values)]

    async def main() -> Any:
        scorer = Scorer(manager, timeout=30.0)
        for one in samples:
            scorer.add(one, group=one.sample_id, group_size=1)
        return await scorer.finish()

    outcomes = asyncio.run(main())
    manager.close()
    assert list(outcomes) == [one.sample_id for one in samples]
    for value, outcome in zip(values, outcomes.values(), strict=True):
        sound = isinstance(value, (bool, float)) and abs(value) <= np.finfo(np.float32).max
        assert isinstance(outcome, Score if sound else Failure)
        if sound:
            assert outcome.value == float(value)
