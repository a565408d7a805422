"""Refill after failed rewards: what is drawn anew, under which attempt, and what the ledger is told."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from dovetail.data.ledger import Ledger
from dovetail.data.loader import Issued
from dovetail.experience.failure_refill import Refilled, refill, thinned
from dovetail.experience.generation import Generated
from dovetail.experience.refill import Rounds

N = 3


class Draws:
    """Draws samples with the scores that it is told, and remembers what was asked."""

    def __init__(self, make_sample: Any, scores: dict[int, Any] | None = None) -> None:
        self.make_sample = make_sample
        self.scores = scores or {}
        self.asked: list[tuple[int, int, int, bool]] = []

    def one(self, item: Issued, group: int, number: int, score: float | None) -> Any:
        made = self.make_sample(group, number, score)
        name = f"train.e0.p{item.prompt.index}.a{item.attempt}.s{number}"
        return attrs.evolve(made, issued=item, sample_id=name)

    def __call__(self, issued: Any, n: Any, *, groups: Any, baseline: Any) -> Generated:
        rows = list(zip(issued, n, groups, baseline, strict=True))
        self.asked += [(group, item.attempt, count, greedy) for item, count, group, greedy in rows]
        return Generated(
            samples=tuple(
                self.one(item, group, number, self.scores.get(group, 9.0))
                for item, count, group, _ in rows
                for number in range(count)
            ),
            baselines=tuple(
                self.one(item, group, 100, 5.0) for item, _, group, greedy in rows if greedy
            ),
        )


def first_round(
    make_sample: Any, scores: dict[int, tuple[float | None, ...]], **greedy: Any
) -> Any:
    """A ledger with these prompts in flight, and their samples."""
    ledger = Ledger(size=10)
    draws = Draws(make_sample)
    issued = []
    for group in scores:
        prompt = make_sample(group).issued.prompt
        issued.append(Issued(epoch=0, attempt=ledger.issue(0, group), prompt=prompt))
    generated = Generated(
        samples=tuple(
            draws.one(item, group, number, score)
            for item, (group, row) in zip(issued, scores.items(), strict=True)
            for number, score in enumerate(row)
        ),
        baselines=tuple(
            draws.one(item, group, 100, greedy["greedy"][group])
            for item, group in zip(issued, scores, strict=True)
            if greedy
        ),
    )
    return ledger, generated, issued


def once(
    ledger: Ledger, generated: Any, issued: Any, draws: Draws, *, whole: bool = False
) -> Refilled:
    return refill(generated, issued, n=N, whole=whole, ledger=ledger, generate=draws)


def test_only_what_failed_is_drawn_anew_and_the_group_has_one_attempt(make_sample) -> None:
    ledger, generated, issued = first_round(
        make_sample, {4: (1.0, None, 0.0), 5: (1.0, 1.0, 0.0), 6: (None, None, None)}
    )
    draws = Draws(make_sample)
    done = once(ledger, generated, issued, draws)
    assert draws.asked == [(4, 1, 1, False), (6, 1, 3, False)]
    assert done.samples == 4
    assert [item.attempt for item in done.issued] == [1, 0, 1]
    sound = [s for s in done.generated.samples if s.score is not None]
    assert Counter(s.group for s in sound) == {4: N, 5: N, 6: N}
    assert {(s.group, s.issued.attempt) for s in sound} == {(4, 1), (5, 0), (6, 1)}
    assert len({s.sample_id for s in done.generated.samples}) == len(done.generated.samples) == 13
    failed = [s for s in done.generated.samples if s.score is None]
    assert {s.issued.attempt for s in failed} == {0}
    assert not thinned(done.generated, N)


def test_the_ledger_uses_each_prompt_once(make_sample) -> None:
    ledger, generated, issued = first_round(make_sample, {0: (1.0, None, 0.0), 1: (1.0, 1.0, 0.0)})
    done = once(ledger, generated, issued, Draws(make_sample))
    rounds = Rounds(2, {}, temperature=1.0)
    rounds.add(done.generated)
    for item in done.issued:
        ledger.finish(item.epoch, item.prompt.index, item.attempt)
    used = {sample.key for sample in rounds.rollout().kept}
    assert used == set(ledger.finished()) == {(0, 0, 1), (0, 1, 0)}
    for key in used:
        ledger.use(*key)
    ledger.check()
    assert ledger.counts()["used"] == 2
    assert ledger.counts()["dropped"] == {}


def test_a_prompt_counts_as_used_where_its_replacements_failed_too(make_sample) -> None:
    ledger, generated, issued = first_round(make_sample, {0: (1.0, None, 0.0)})
    done = once(ledger, generated, issued, Draws(make_sample, {0: None}))
    assert thinned(done.generated, N)
    kept = [s for s in done.generated.samples if s.score is not None]
    assert {s.key for s in kept} == {(0, 0, 1)}
    assert len(kept) == 2


def test_groups_that_are_scored_together_are_drawn_anew_as_a_whole(make_sample) -> None:
    ledger, generated, issued = first_round(make_sample, {0: (1.0, None, 0.0), 1: (1.0, 1.0, 0.0)})
    draws = Draws(make_sample)
    done = once(ledger, generated, issued, draws, whole=True)
    assert draws.asked == [(0, 1, N, False)]
    scores = [s.score for s in done.generated.samples if s.group == 0]
    assert scores == [None, 9.0, 9.0, 9.0]


@pytest.mark.parametrize("whole", [False, True])
def test_a_baseline_that_failed_is_drawn_anew_alone(make_sample, whole) -> None:
    ledger, generated, issued = first_round(
        make_sample, {0: (1.0, 0.0, 0.0), 1: (1.0, 1.0, 0.0)}, greedy={0: None, 1: 1.0}
    )
    draws = Draws(make_sample)
    done = once(ledger, generated, issued, draws, whole=whole)
    assert draws.asked == [(0, 1, 0, True)]
    assert [(s.group, s.score) for s in done.generated.baselines] == [(0, 5.0), (1, 1.0)]
    assert [s.issued.attempt for s in done.generated.samples] == [1] * 3 + [0] * 3


score = st.none() | st.floats(-1, 1)


@given(
    rows=st.lists(st.tuples(score, score, score), min_size=1, max_size=5),
    again=st.lists(score, min_size=5, max_size=5),
    rounds=st.integers(1, 3),
)
def test_no_sample_is_lost_or_trained_on_twice(make_sample, rows, again, rounds) -> None:
    ledger, generated, issued = first_round(make_sample, dict(enumerate(rows)))
    sound = {s.sample_id for s in generated.samples if s.score is not None}
    for _ in range(rounds):
        if not thinned(generated, N):
            break
        done = once(ledger, generated, issued, Draws(make_sample, dict(enumerate(again))))
        generated, issued = done.generated, done.issued
    names = [s.sample_id for s in generated.samples]
    assert len(names) == len(set(names))
    assert sound <= set(names)
    kept = Counter(s.group for s in generated.samples if s.score is not None)
    assert all(count <= N for count in kept.values())
    keys = {s.group: s.key for s in generated.samples if s.score is not None}
    latest = {item.prompt.index: (0, item.prompt.index, item.attempt) for item in issued}
    assert all(key == latest[group] for group, key in keys.items())
    assert set(ledger.open()) == set(latest.values())
