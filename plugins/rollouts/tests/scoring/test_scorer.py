"""The scorer: streaming, whole groups, limits on concurrency, and use over several rollouts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dovetail.errors import RewardError
from dovetail.interfaces import Score
from dovetail_rollouts import Scorer


def test_scoring_begins_while_others_still_generate(scripted) -> None:
    async def main() -> None:
        manager = scripted.Manager(scripted.ones)
        scorer = Scorer(manager, timeout=5.0)
        scorer.add(scripted.sample("first"), group=0, group_size=8)
        await asyncio.sleep(0.01)
        assert len(manager.calls) == 1
        scorer.add(scripted.sample("second"), group=0, group_size=8)
        assert list(await scorer.finish()) == ["first", "second"]

    scripted.until_done(main())


def test_groups_are_scored_whole_and_at_once_when_complete(scripted) -> None:
    async def main() -> None:
        manager = scripted.Manager(scripted.ones, unit="group")
        scorer = Scorer(manager, timeout=5.0)
        for name in ("a0", "b0", "a1"):
            scorer.add(scripted.sample(name), group=name[0], group_size=2)
        await asyncio.sleep(0.01)
        assert [[s.sample_id for s in call] for call in manager.calls] == [["a0", "a1"]]
        outcomes = await scorer.finish()
        # A group that generation left incomplete is scored without the missing sample.
        assert [[s.sample_id for s in call] for call in manager.calls[1:]] == [["b0"]]
        assert list(outcomes) == ["a0", "b0", "a1"]

    scripted.until_done(main())


@pytest.mark.parametrize(("concurrency", "capacity", "most"), [(3, None, 3), (8, 2, 2), (2, 8, 2)])
def test_no_more_calls_run_than_allowed(scripted, concurrency, capacity, most) -> None:
    async def slow(samples: Any) -> Any:
        await asyncio.sleep(0.005)
        return scripted.ones(samples)

    manager = scripted.Manager(lambda samples, *_: slow(samples), capacity=capacity)
    outcomes, _ = scripted.run(manager, [f"s{i}" for i in range(12)], concurrency=concurrency)
    assert len(outcomes) == 12
    assert manager.most == most


def test_a_manager_that_queues_is_called_for_every_sample_at_once(scripted) -> None:
    class Queue(scripted.Manager):
        queues = True

    async def slow(samples: Any) -> Any:
        await asyncio.sleep(0.01)
        return scripted.ones(samples)

    manager = Queue(lambda samples, *_: slow(samples), capacity=1)
    scripted.run(manager, [f"s{i}" for i in range(12)], concurrency=2)
    assert manager.most == 12


def test_scores_come_back_as_float_and_float32(scripted) -> None:
    async def main() -> Any:
        given_ = Score(value=np.float32(3), token_rewards=[1, 0, 2], extras={"x": 1})
        scorer = Scorer(scripted.Manager(lambda *_: [given_]), timeout=5.0)
        scorer.add(scripted.sample("a", response_ids=np.arange(3)), group=0, group_size=1)
        return (await scorer.finish())["a"]

    result = scripted.until_done(main())
    assert type(result.value) is float
    assert result.token_rewards.dtype == np.float32
    assert result.token_rewards.tolist() == [1.0, 0.0, 2.0]
    assert result.extras == {"x": 1}


def test_a_sample_added_twice_is_refused(scripted) -> None:
    with pytest.raises(RewardError, match=r"'a' was.*scorer twice"):
        scripted.run(scripted.Manager(scripted.ones), ["a", "a"])


def test_a_scorer_serves_several_rollouts_and_loops(scripted) -> None:
    scorer = Scorer(
        scripted.Manager(lambda *_: [scripted.failure(False)]), timeout=5.0, concurrency=1
    )

    async def once(names: list[str]) -> Any:
        for name in names:
            scorer.add(scripted.sample(name), group=name, group_size=1)
        return await scorer.finish()

    assert list(scripted.until_done(once(["a", "b", "c"]))) == ["a", "b", "c"]
    assert list(scripted.until_done(once(["a"]))) == ["a"]
    assert scripted.until_done(once([])) == {}


def test_some_samples_may_be_waited_for_while_others_are_scored(scripted) -> None:
    async def answer(samples: Any) -> Any:
        if samples[0].sample_id == "slow":
            await asyncio.sleep(1.0)
        return [Score(value=2.0)]

    async def main() -> None:
        manager = scripted.Manager(lambda samples, *_: answer(samples))
        scorer = Scorer(manager, timeout=5.0)
        for name in ("slow", "b", "a"):
            scorer.add(scripted.sample(name), group=name, group_size=1)
        found = await scorer.outcomes(["a", "b"])
        assert [(name, score.value) for name, score in found.items()] == [("a", 2.0), ("b", 2.0)]
        assert asyncio.get_running_loop().time() < 1.0
        assert manager.running == 1
        scorer.add(scripted.sample("a"), group="a", group_size=1)  # the scorer has forgotten `a`
        assert list(await scorer.outcomes(["slow"])) == ["slow"]
        assert list(await scorer.finish()) == ["a"]

    scripted.until_done(main())


def test_an_incomplete_group_is_scored_as_it_is_when_it_is_waited_for_and_no_other(
    scripted,
) -> None:
    async def main() -> None:
        manager = scripted.Manager(scripted.ones, unit="group")
        scorer = Scorer(manager, timeout=5.0)
        for name in ("a0", "b0"):
            scorer.add(scripted.sample(name), group=name[0], group_size=2)
        assert list(await scorer.outcomes(["a0"])) == ["a0"]
        assert [[s.sample_id for s in call] for call in manager.calls] == [["a0"]]
        scorer.add(scripted.sample("b1"), group="b", group_size=2)
        await scorer.outcomes(["b0", "b1"])
        assert [s.sample_id for s in manager.calls[1]] == ["b0", "b1"]

    scripted.until_done(main())


def test_what_is_forgotten_is_not_scored_any_more_and_may_be_added_again(scripted) -> None:
    async def main() -> None:
        answers = {"old": scripted.hang}
        manager = scripted.Manager(
            lambda samples, *_: answers.get("old", lambda: scripted.ones(samples))()
        )
        scorer = Scorer(manager, timeout=60.0)
        for name in ("a", "b"):
            scorer.add(scripted.sample(name), group=name, group_size=1)
        await asyncio.sleep(0.01)
        assert manager.running == 2
        await scorer.forget(["a", "one that was never added"])
        assert manager.running == 1
        answers.clear()
        scorer.add(scripted.sample("a"), group="a", group_size=1)
        assert (await scorer.outcomes(["a"]))["a"].value == 1.0
        with pytest.raises(RewardError, match=r"'b' was.*scorer twice"):
            scorer.add(scripted.sample("b"), group="b", group_size=1)
        await scorer.forget(["b"])

    scripted.until_done(main())


def test_a_forgotten_group_that_was_incomplete_begins_anew(scripted) -> None:
    async def main() -> None:
        manager = scripted.Manager(scripted.ones, unit="group")
        scorer = Scorer(manager, timeout=5.0)
        scorer.add(scripted.sample("a0"), group="a", group_size=2)
        await scorer.forget(["a0"])
        for name in ("a0", "a1"):
            scorer.add(scripted.sample(name), group="a", group_size=2)
        await scorer.outcomes(["a0", "a1"])
        assert [[s.sample_id for s in call] for call in manager.calls] == [["a0", "a1"]]

    scripted.until_done(main())


def test_cancelling_stops_what_runs(scripted) -> None:
    async def main() -> None:
        manager = scripted.Manager(lambda *_: scripted.hang())
        scorer = Scorer(manager, timeout=60.0)
        scorer.add(scripted.sample("a"), group=0, group_size=1)
        await asyncio.sleep(0.01)
        assert manager.running == 1
        await scorer.cancel()
        assert manager.running == 0

    scripted.until_done(main())


def test_cancelling_the_waiter_cancels_scoring(scripted) -> None:
    async def main() -> None:
        manager = scripted.Manager(lambda *_: scripted.hang())
        scorer = Scorer(manager, timeout=60.0)
        scorer.add(scripted.sample("a"), group=0, group_size=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scorer.finish(), 0.02)
        await asyncio.sleep(0.01)
        assert manager.running == 0

    scripted.until_done(main())


def test_the_manager_sleeps_when_everything_is_scored_or_given_up(scripted) -> None:
    class Sleeper(scripted.Manager):
        slept_while_running: list[int]

        def sleep(self) -> None:
            self.slept_while_running.append(self.running)

    async def slow(samples: Any) -> list[Any]:
        await asyncio.sleep(0.01)
        return scripted.ones(samples)

    async def main() -> None:
        manager = Sleeper(lambda samples, *_: slow(samples))
        manager.slept_while_running = []
        scorer = Scorer(manager, timeout=5.0)
        for name in ("a", "b"):
            scorer.add(scripted.sample(name), group=name, group_size=1)
        await scorer.finish()
        scorer.add(scripted.sample("c"), group="c", group_size=1)
        await asyncio.sleep(0)
        await scorer.cancel()
        assert manager.slept_while_running == [0, 0]

    scripted.until_done(main())
