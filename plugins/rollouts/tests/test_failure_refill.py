"""Refill after failed rewards: which samples are drawn again, under which attempt, and which are kept."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.interfaces import (
    Failure,
    FailureKind,
    PluginContext,
    Prompt,
    RewardManager,
    SamplingParams,
    Score,
)
from dovetail.sections import PluginSection
from dovetail_rollouts import Generation, Group, RolloutPool, Scorer
from dovetail_rollouts.dynamic_sampler import DynamicSampler
from dovetail_sdk.testing.scripted_rollout import ScriptedRollout

N = 3


class Told(RewardManager):
    """A manager with given scores by sample id; None is a failure, and samples without a given score get 9."""

    name = "told"
    api = ">=1.0,<2"

    def __init__(self, scores: dict[str, float | None]) -> None:
        super().__init__(PluginSection(name="told"), PluginContext())
        self.scores = scores

    async def score(self, samples: Any, time: Any) -> list[Any]:
        failure = Failure(kind=FailureKind.EXCEPTION, message="no")
        values = [self.scores.get(sample.sample_id, 9.0) for sample in samples]
        return [failure if value is None else Score(value=value) for value in values]


class Drawn:
    """The groups of some prompts, drawn by a scripted engine.

    Attributes:
        asked: prompt, attempt, samples and purpose of each request since the last refill.
    """

    def __init__(
        self, scores: dict[int, tuple[float | None, ...]], greedy: dict[int, Any] | None = None
    ) -> None:
        self.told: dict[str, float | None] = {}
        self.engine = ScriptedRollout()
        self.tell(0, scores, greedy or {})
        self.groups = [
            Group(
                prompt=Prompt(index=prompt, prompt_ids=np.arange(2), raw=str(prompt)),
                n=N,
                sampling=SamplingParams(max_new_tokens=4),
                baseline=greedy is not None,
            )
            for prompt in scores
        ]
        self.draw(self.groups)

    def tell(self, attempt: int, scores: dict[int, Any], greedy: dict[int, Any]) -> None:
        for prompt, row in scores.items():
            for number, score in enumerate(row):
                self.told[f"train.e0.p{prompt}.a{attempt}.s{number}"] = score
        for prompt, score in greedy.items():
            self.told[f"baseline.e0.p{prompt}.a{attempt}.s0"] = score

    def draw(self, groups: list[Group]) -> None:
        scorer = Scorer(Told(self.told), timeout=5.0)
        tokenizer: Any = type("Tokenizer", (), {"decode": lambda self, ids, **_: str(ids)})()

        async def all_of_them() -> None:
            pool = RolloutPool([self.engine])
            generation = Generation(pool=pool, scorer=scorer, tokenizer=tokenizer, seed=1)
            await asyncio.gather(*generation.begin(groups))

        asyncio.run(all_of_them())

    def thinned(self) -> list[Group]:
        return [group for group in self.groups if group.missing() != (0, False)]

    def refill(self, *, whole: bool = False) -> None:
        """Draw samples in place of those that could not be scored."""
        self.engine.requests.clear()
        thinned = self.thinned()
        for group in thinned:
            group.try_again(whole=whole)
            assert not group.finished
        self.draw(thinned)

    @property
    def asked(self) -> list[tuple[int, int, int, str]]:
        streams = [(request.streams[0], request.n) for request in self.engine.requests]
        return [(s.prompt, s.attempt, n, s.purpose) for s, n in streams]

    def scores(self, place: int = 0) -> list[float | None]:
        return [sample.score for sample in self.groups[place].samples]


def test_only_what_failed_is_drawn_anew_and_the_group_has_one_attempt() -> None:
    made = Drawn({4: (1.0, None, 0.0), 5: (1.0, 1.0, 0.0), 6: (None, None, None)})
    made.refill()
    assert made.asked == [(4, 1, 1, "train"), (6, 1, 3, "train")]
    assert [group.prompt.attempt for group in made.groups] == [1, 0, 1]
    samples = [sample for group in made.groups for sample in group.samples]
    sound = [sample for sample in samples if sample.score is not None]
    assert Counter(sample.prompt.key for sample in sound) == {
        (0, 4, 1): N,
        (0, 5, 0): N,
        (0, 6, 1): N,
    }
    assert len({sample.sample_id for sample in samples}) == len(samples) == 13
    assert {sample.prompt.key[2] for sample in samples if sample.score is None} == {0}
    assert made.scores() == [1.0, None, 0.0, 9.0]
    assert not made.thinned()


def test_each_prompt_is_trained_on_under_its_latest_attempt() -> None:
    made = Drawn({0: (1.0, None, 0.0), 1: (1.0, 1.0, 0.0)})
    made.refill()
    rollout = DynamicSampler(2, {}, temperature=1.0)
    rollout.add(made.groups)
    assert {sample.prompt.key for sample in rollout.kept} == {(0, 0, 1), (0, 1, 0)}
    assert rollout.reasons == {(0, 0, 0): "reward_failures"}


def test_a_prompt_is_trained_on_where_its_replacements_failed_too() -> None:
    made = Drawn({0: (1.0, None, 0.0)})
    made.tell(1, {0: (None,)}, {})
    made.refill()
    assert made.thinned()
    sound = [sample for sample in made.groups[0].samples if sample.score is not None]
    assert {sample.prompt.key for sample in sound} == {(0, 0, 1)}
    assert len(sound) == 2


def test_groups_that_are_scored_together_are_drawn_anew_as_a_whole() -> None:
    made = Drawn({0: (1.0, None, 0.0), 1: (1.0, 1.0, 0.0)})
    made.refill(whole=True)
    assert made.asked == [(0, 1, N, "train")]
    assert made.scores() == [None, 9.0, 9.0, 9.0]
    assert made.scores(1) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("whole", [False, True])
def test_a_baseline_that_failed_is_drawn_anew_alone(whole) -> None:
    made = Drawn({0: (1.0, 0.0, 0.0), 1: (1.0, 1.0, 0.0)}, greedy={0: None, 1: 1.0})
    made.tell(1, {}, {0: 5.0})
    made.refill(whole=whole)
    assert made.asked == [(0, 1, 1, "baseline")]
    assert [group.greedy and group.greedy.score for group in made.groups] == [5.0, 1.0]
    attempts = [sample.prompt.key[2] for group in made.groups for sample in group.samples]
    assert attempts == [1] * 3 + [0] * 3


def test_a_sound_baseline_is_kept_where_samples_are_drawn_anew() -> None:
    made = Drawn({0: (1.0, None, 0.0)}, greedy={0: 2.0})
    before = made.groups[0].greedy
    made.refill()
    assert made.asked == [(0, 1, 1, "train")]
    assert made.groups[0].greedy is before


score = st.none() | st.floats(-1, 1)


@given(
    rows=st.lists(st.tuples(score, score, score), min_size=1, max_size=5),
    again=st.lists(st.tuples(score, score, score), min_size=3, max_size=3),
    rounds=st.integers(1, 3),
    whole=st.booleans(),
)
def test_no_sample_is_lost_or_trained_on_twice(rows, again, rounds, whole) -> None:
    made = Drawn(dict(enumerate(rows)))
    sound = {s.sample_id for g in made.groups for s in g.samples if s.score is not None}
    for attempt, scores in enumerate(again[:rounds], 1):
        made.tell(attempt, dict.fromkeys(range(len(rows)), scores), {})
        if made.thinned():
            made.refill(whole=whole)
    samples = [sample for group in made.groups for sample in group.samples]
    names = [sample.sample_id for sample in samples]
    assert len(names) == len(set(names))
    assert whole or sound <= set(names)
    for group in made.groups:
        kept = [sample for sample in group.samples if sample.score is not None]
        assert len(kept) <= N
        assert group.missing() == (N - len(kept), False)
        assert all(sample.prompt is group.prompt for sample in kept)
        assert not whole or len({sample.completion.request_id for sample in kept}) <= 1
