"""The scorer: streaming, time-outs, retries, and one valid outcome for every sample whatever a manager does."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.config.sections import PluginSection
from dovetail.errors import RewardError
from dovetail.flow.scorer import Scorer
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.reward import (
    Failure,
    FailureKind,
    RewardManager,
    RewardSample,
    RewardUnit,
    Score,
)


class Manager(RewardManager):
    """A manager whose answer is a function of the unit and of the number of calls so far."""

    name = "scripted"
    api = ">=1.0,<2"

    def __init__(self, answer: Any, *, unit: str = "sample", capacity: int | None = None) -> None:
        super().__init__(PluginSection(name="scripted"), PluginContext())
        self.answer = answer
        self.unit = unit
        self.limit = capacity
        self.units: list[RewardUnit] = []
        self.running = 0
        self.most = 0

    @property
    def capacity(self) -> int | None:
        return self.limit

    async def score(self, unit: RewardUnit) -> Any:
        self.units.append(unit)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            answer = self.answer(unit, len(self.units))
            return await answer if asyncio.iscoroutine(answer) else answer
        finally:
            self.running -= 1


def ones(unit: RewardUnit, _: int) -> list[Any]:
    return [Score(value=1.0) for _ in unit.samples]


def sample(name: str, **fields: Any) -> RewardSample:
    return RewardSample(sample_id=name, prompt="", solution_str="", **fields)


def run(manager: Manager, names: list[str], *, group_size: int = 1, **options: Any) -> Any:
    """Outcomes and the scorer; samples `a0`, `a1` are of the group `a`."""

    async def main() -> Any:
        scorer = Scorer(manager, **{"timeout": 5.0, "backoff": 0.001, **options})
        for name in names:
            scorer.add(sample(name), group=name[0], group_size=group_size)
        return await scorer.finish(), scorer

    return asyncio.run(main())


def test_scoring_begins_while_others_still_generate() -> None:
    async def main() -> None:
        manager = Manager(ones)
        scorer = Scorer(manager, timeout=5.0)
        scorer.add(sample("first"), group=0, group_size=8)
        await asyncio.sleep(0.01)
        assert len(manager.units) == 1
        scorer.add(sample("second"), group=0, group_size=8)
        assert list(await scorer.finish()) == ["first", "second"]

    asyncio.run(main())


def test_groups_are_scored_whole_and_at_once_when_complete() -> None:
    async def main() -> None:
        manager = Manager(ones, unit="group")
        scorer = Scorer(manager, timeout=5.0)
        for name in ("a0", "b0", "a1"):
            scorer.add(sample(name), group=name[0], group_size=2)
        await asyncio.sleep(0.01)
        assert [[s.sample_id for s in unit.samples] for unit in manager.units] == [["a0", "a1"]]
        outcomes = await scorer.finish()
        # the group that generation left incomplete is scored as it is
        assert [[s.sample_id for s in unit.samples] for unit in manager.units[1:]] == [["b0"]]
        assert list(outcomes) == ["a0", "b0", "a1"]

    asyncio.run(main())


@pytest.mark.parametrize(("concurrency", "capacity", "most"), [(3, None, 3), (8, 2, 2), (2, 8, 2)])
def test_no_more_units_run_than_allowed(concurrency, capacity, most) -> None:
    async def slow(unit: RewardUnit) -> Any:
        await asyncio.sleep(0.005)
        return ones(unit, 0)

    manager = Manager(lambda unit, _: slow(unit), capacity=capacity)
    outcomes, _ = run(manager, [f"s{i}" for i in range(12)], concurrency=concurrency)
    assert len(outcomes) == 12
    assert manager.most == most


def test_a_unit_that_hangs_times_out_and_is_counted() -> None:
    async def hang() -> Any:
        await asyncio.Event().wait()

    began = time.monotonic()
    manager = Manager(lambda unit, _: hang() if unit.samples[0].sample_id == "b" else ones(unit, 0))
    outcomes, scorer = run(manager, ["a", "b", "c"], timeout=0.05)
    assert time.monotonic() - began < 2.0
    assert outcomes["b"].kind is FailureKind.TIMEOUT
    assert outcomes["b"].message == "no outcome from reward manager 'scripted' within 0.05 s"
    assert outcomes["a"].value == outcomes["c"].value == 1.0
    assert scorer.counts == Counter({FailureKind.TIMEOUT: 1})


def test_waiting_for_a_place_does_not_count_as_running() -> None:
    async def slow(unit: RewardUnit) -> Any:
        await asyncio.sleep(0.05)
        return ones(unit, 0)

    outcomes, scorer = run(
        Manager(lambda unit, _: slow(unit)), list("abcdef"), timeout=0.15, concurrency=1
    )
    assert not scorer.counts
    assert len(outcomes) == 6


def test_what_the_manager_marks_as_waiting_does_not_count() -> None:
    async def queued(unit: RewardUnit) -> Any:
        await asyncio.sleep(0.05)
        with unit.time.waiting():
            await asyncio.sleep(0.3)
        await asyncio.sleep(0.02)
        return ones(unit, 0)

    manager = Manager(lambda unit, _: queued(unit))
    outcomes, _ = run(manager, ["a", "b"], timeout=0.2)
    assert [outcome.value for outcome in outcomes.values()] == [1.0, 1.0]
    assert manager.units[0].time.limit == 0.2


def test_running_counts_again_after_waiting() -> None:
    async def hangs_later(unit: RewardUnit) -> Any:
        with unit.time.waiting():
            await asyncio.sleep(0.1)
        await asyncio.Event().wait()

    began = time.monotonic()
    outcomes, _ = run(Manager(lambda unit, _: hangs_later(unit)), ["a"], timeout=0.1)
    assert outcomes["a"].kind is FailureKind.TIMEOUT
    assert 0.2 <= time.monotonic() - began < 2.0


def test_time_counts_again_only_when_no_sample_of_the_unit_waits() -> None:
    async def one(unit: RewardUnit, seconds: float) -> None:
        with unit.time.waiting():
            await asyncio.sleep(seconds)

    async def group(unit: RewardUnit) -> Any:
        await asyncio.gather(*(one(unit, seconds) for seconds in (0.05, 0.3)))
        return ones(unit, 0)

    manager = Manager(lambda unit, _: group(unit), unit="group")
    outcomes, _ = run(manager, ["a0", "a1"], group_size=2, timeout=0.1)
    assert [outcome.value for outcome in outcomes.values()] == [1.0, 1.0]


def test_a_manager_that_queues_gets_every_unit_at_once() -> None:
    class Queue(Manager):
        queues = True

    async def slow(unit: RewardUnit) -> Any:
        await asyncio.sleep(0.01)
        return ones(unit, 0)

    manager = Queue(lambda unit, _: slow(unit), capacity=1)
    run(manager, [f"s{i}" for i in range(12)], concurrency=2)
    assert manager.most == 12


def test_a_late_answer_is_late_even_where_the_manager_swallows_its_cancellation() -> None:
    async def stubborn(unit: RewardUnit) -> Any:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return ones(unit, 0)

    outcomes, _ = run(Manager(lambda unit, _: stubborn(unit)), ["a"], timeout=0.05)
    assert outcomes["a"].kind is FailureKind.TIMEOUT


def failure(retryable: bool) -> Failure:
    return Failure(kind=FailureKind.UNREACHABLE, message="no judge", retryable=retryable)


def test_retryable_failures_are_tried_again() -> None:
    manager = Manager(lambda unit, n: [failure(True)] if n < 3 else ones(unit, n))
    outcomes, scorer = run(manager, ["a"], retries=2)
    assert outcomes["a"].value == 1.0
    assert scorer.retried == 2
    assert not scorer.counts


def test_retries_end() -> None:
    manager = Manager(lambda *_: [failure(True)])
    outcomes, scorer = run(manager, ["a"], retries=2)
    assert outcomes["a"] == failure(True)
    assert len(manager.units) == 3
    assert scorer.counts == Counter({FailureKind.UNREACHABLE: 1})


def test_other_failures_are_not_tried_again() -> None:
    manager = Manager(lambda *_: [failure(False)])
    run(manager, ["a"], retries=5)
    assert len(manager.units) == 1


def test_a_time_out_is_tried_again() -> None:
    async def hang() -> Any:
        await asyncio.Event().wait()

    manager = Manager(lambda unit, n: hang() if n == 1 else ones(unit, n))
    outcomes, _ = run(manager, ["a"], timeout=0.05, retries=1)
    assert outcomes["a"].value == 1.0


def test_a_retried_group_is_judged_by_its_last_try_alone() -> None:
    tries = [[Score(value=1.0), failure(True)], [Score(value=5.0), Score(value=6.0)]]
    manager = Manager(lambda _, n: tries[n - 1], unit="group")
    outcomes, _ = run(manager, ["a0", "a1"], group_size=2, retries=1)
    assert [outcome.value for outcome in outcomes.values()] == [5.0, 6.0]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("boom"), "raised RuntimeError: boom"),
        (SystemExit(1), "raised SystemExit: 1"),
        (TimeoutError("inner"), "raised TimeoutError: inner"),
        (asyncio.CancelledError(), "was cancelled"),
    ],
)
def test_a_manager_that_raises_fails_every_sample_of_the_unit(error, text) -> None:
    def answer(*_: Any) -> Any:
        raise error

    outcomes, scorer = run(Manager(answer, unit="group"), ["a0", "a1"], group_size=2)
    assert [o.kind for o in outcomes.values()] == [FailureKind.CRASH] * 2
    assert f"reward manager 'scripted' {text}" in outcomes["a0"].message
    assert scorer.counts == Counter({FailureKind.CRASH: 2})


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ([], "returned 0 outcomes for 2 samples"),
        ([Score(value=1.0)] * 3, "returned 3 outcomes for 2 samples"),
        (None, "returned NoneType and not a list"),
        (1.0, "returned float and not a list"),
        ("ab", "returned str and not a list"),
        ({"a0": 1.0, "a1": 1.0}, "returned dict and not a list"),
    ],
)
def test_an_answer_of_the_wrong_form_fails_the_unit(answer, text) -> None:
    outcomes, _ = run(Manager(lambda *_: answer, unit="group"), ["a0", "a1"], group_size=2)
    assert all(isinstance(outcome, Failure) for outcome in outcomes.values())
    assert text in outcomes["a1"].message


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (1.0, "1.0 (float) in place of a Score or a Failure"),
        (None, "None (NoneType) in place of"),
        (Score(value=math.nan), "the value nan"),
        (Score(value=math.inf), "the value inf"),
        (Score(value=1e39), "the value 1e+39"),
        (Score(value="1.0"), "the value '1.0'"),
        (Score(value=None), "the value None"),
        (Score(value=1.0, components={"acc": math.nan}), "the component acc = nan"),
        (Score(value=1.0, components=None), "raised AttributeError"),
        (Score(value=1.0, token_rewards=np.ones(2)), "2 token rewards for 3 response tokens"),
        (Score(value=3.0, token_rewards=np.array([1, np.nan, 2])), "not all finite"),
        (Score(value=1.0, token_rewards=np.array([0, 0, 2.0])), "sum to 2 with the value 1"),
        (Score(value=1.0, token_rewards=np.ones((3, 1))), "shape (3, 1)"),
        (Score(value=1.0, token_rewards=np.array(["a", "b", "c"])), "dtype <U1"),
    ],
)
def test_an_invalid_outcome_is_a_failure_that_shows_it(outcome, text) -> None:
    async def main() -> Any:
        scorer = Scorer(Manager(lambda *_: [outcome]), timeout=5.0)
        scorer.add(sample("a", response_ids=np.arange(3)), group=0, group_size=1)
        return await scorer.finish()

    result = asyncio.run(main())["a"]
    assert isinstance(result, Failure)
    assert text in result.message


def test_scores_come_back_as_float_and_float32() -> None:
    async def main() -> Any:
        given_ = Score(value=np.float32(3), token_rewards=[1, 0, 2], extras={"x": 1})
        scorer = Scorer(Manager(lambda *_: [given_]), timeout=5.0)
        scorer.add(sample("a", response_ids=np.arange(3)), group=0, group_size=1)
        return (await scorer.finish())["a"]

    result = asyncio.run(main())
    assert type(result.value) is float
    assert result.token_rewards.dtype == np.float32
    assert result.token_rewards.tolist() == [1.0, 0.0, 2.0]
    assert result.extras == {"x": 1}


def test_a_sample_added_twice_is_refused() -> None:
    with pytest.raises(RewardError, match="'a' was added to the scorer twice"):
        run(Manager(ones), ["a", "a"])


def test_a_scorer_serves_several_rollouts_and_loops() -> None:
    scorer = Scorer(Manager(lambda *_: [failure(False)]), timeout=5.0, concurrency=1)

    async def once(names: list[str]) -> Any:
        for name in names:
            scorer.add(sample(name), group=name, group_size=1)
        return await scorer.finish()

    assert list(asyncio.run(once(["a", "b", "c"]))) == ["a", "b", "c"]
    assert scorer.counts.total() == 3
    assert list(asyncio.run(once(["a"]))) == ["a"]
    assert scorer.counts.total() == 1
    assert asyncio.run(once([])) == {}
    assert scorer.counts.total() == 0


def test_cancelling_stops_what_runs() -> None:
    async def main() -> None:
        async def hang() -> Any:
            await asyncio.Event().wait()

        manager = Manager(lambda *_: hang())
        scorer = Scorer(manager, timeout=60.0)
        scorer.add(sample("a"), group=0, group_size=1)
        await asyncio.sleep(0.01)
        assert manager.running == 1
        await scorer.cancel()
        assert manager.running == 0

    asyncio.run(main())


def test_cancelling_the_waiter_cancels_scoring() -> None:
    async def main() -> None:
        async def hang() -> Any:
            await asyncio.Event().wait()

        manager = Manager(lambda *_: hang())
        scorer = Scorer(manager, timeout=60.0)
        scorer.add(sample("a"), group=0, group_size=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scorer.finish(), 0.02)
        await asyncio.sleep(0.01)
        assert manager.running == 0

    asyncio.run(main())


numbers = st.one_of(
    st.floats(), st.integers(), st.booleans(), st.none(), st.text(max_size=3), st.complex_numbers()
)
answers = st.one_of(
    numbers,
    st.builds(lambda v: Score(value=v), numbers),
    st.builds(lambda v, c: Score(value=v, components={"c": c}), numbers, numbers),
    st.builds(
        lambda k, r: Failure(kind=k, message="", retryable=r),
        st.sampled_from(FailureKind),
        st.booleans(),
    ),
    st.just(RuntimeError("boom")),
)


@given(script=st.lists(answers, max_size=10), retries=st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_every_sample_gets_one_outcome_and_no_failure_becomes_a_number(script, retries) -> None:
    def answer(unit: RewardUnit, _: int) -> Any:
        chosen = script[int(unit.samples[0].sample_id)]
        if isinstance(chosen, Exception):
            raise chosen
        return [chosen]

    async def main() -> Any:
        scorer = Scorer(Manager(answer), timeout=5.0, retries=retries, backoff=0.0)
        for i in range(len(script)):
            scorer.add(sample(str(i)), group=i, group_size=1)
        return await scorer.finish(), scorer.counts

    outcomes, counts = asyncio.run(main())
    assert list(outcomes) == [str(i) for i in range(len(script))]
    failures = 0
    for chosen, outcome in zip(script, outcomes.values(), strict=True):
        if isinstance(outcome, Failure):
            failures += 1
        else:
            assert isinstance(chosen, Score)
            assert outcome.value == chosen.value
            assert math.isfinite(np.float32(outcome.value))
            assert all(math.isfinite(part) for part in outcome.components.values())
    assert counts.total() == failures


def test_the_manager_sleeps_when_everything_is_scored_or_given_up() -> None:
    class Sleeper(Manager):
        slept_while_running: list[int]

        def sleep(self) -> None:
            self.slept_while_running.append(self.running)

    async def slow(unit: RewardUnit) -> list[Any]:
        await asyncio.sleep(0.01)
        return ones(unit, 0)

    async def main() -> None:
        manager = Sleeper(lambda unit, _: slow(unit))
        manager.slept_while_running = []
        scorer = Scorer(manager, timeout=5.0)
        for name in ("a", "b"):
            scorer.add(sample(name), group=name, group_size=1)
        await scorer.finish()
        scorer.add(sample("c"), group="c", group_size=1)
        await asyncio.sleep(0)
        await scorer.cancel()
        assert manager.slept_while_running == [0, 0]

    asyncio.run(main())
