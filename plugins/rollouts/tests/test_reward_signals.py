"""Signs of reward hacking, against simple reference implementations."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.interfaces import Score
from dovetail_rollouts.sample_metrics import (
    distribution,
    repeated_shares,
    reward_signals,
    rollout_metrics,
)


def of(make_sample: Any, rows: Any) -> list[Any]:
    """Make samples of (group, score, length), each with its own text."""
    return [
        attrs.evolve(make_sample(group, number, score, length=length), text=f"text {number}")
        for number, (group, score, length) in enumerate(rows)
    ]


@given(st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=5))
def test_repeated_text_is_the_share_of_runs_that_stood_before(responses: list[list[int]]) -> None:
    expected = []
    for ids in responses:
        runs = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
        again = sum(run in runs[:i] for i, run in enumerate(runs))
        expected.append(again / max(len(runs), 1))
    found = repeated_shares([np.array(ids, np.int64) for ids in responses])
    assert found == pytest.approx(expected)


def test_a_response_that_goes_round_in_circles_repeats_nearly_all_of_itself() -> None:
    circles, straight = repeated_shares([np.tile(np.arange(10), 30), np.arange(300)])
    assert circles > 0.95
    assert straight == 0.0


row = st.tuples(st.integers(0, 3), st.floats(-2, 2) | st.none(), st.integers(0, 20))


@given(rows=st.lists(row, min_size=1, max_size=20))
def test_length_correlation_is_within_groups(make_sample, rows) -> None:
    found = reward_signals(of(make_sample, rows)).get("reward/length_correlation")
    scored = [r for r in rows if r[1] is not None]
    pairs = []
    for group, score, length in scored:
        same = [r for r in scored if r[0] == group]
        mean_score = sum(r[1] for r in same) / len(same)
        pairs.append((score - mean_score, length - sum(r[2] for r in same) / len(same)))
    xx, yy = sum(x * x for x, _ in pairs), sum(y * y for _, y in pairs)
    if found is None:
        assert (xx * yy) ** 0.5 < 1e-8
    else:
        expected = sum(x * y for x, y in pairs) / (xx * yy) ** 0.5
        assert found == pytest.approx(expected, abs=1e-6)
        assert -1.0 - 1e-9 <= found <= 1.0 + 1e-9


def test_longer_answers_to_harder_prompts_are_no_sign(make_sample) -> None:
    rows = [(0, 0.0, 5), (0, 1.0, 5), (1, 8.0, 50), (1, 9.0, 50)]
    assert "reward/length_correlation" not in reward_signals(of(make_sample, rows))


def test_identical_responses_count_within_their_group(make_sample) -> None:
    samples = of(make_sample, [(0, 1.0, 3)] * 3 + [(1, 1.0, 3)])
    same = [attrs.evolve(sample, text="same") for sample in samples]
    assert reward_signals(same)["reward/identical_responses"] == pytest.approx(2 / 4)
    assert reward_signals(samples)["reward/identical_responses"] == 0.0
    assert reward_signals([]) == {}


def test_a_component_has_its_spread(make_sample) -> None:
    assert distribution("a", np.arange(11.0)) == {
        "reward/component_std/a": pytest.approx(np.sqrt(10.0)),
        "reward/component_p10/a": 1.0,
        "reward/component_p90/a": 9.0,
    }
    samples = of(make_sample, [(0, float(i), 3) for i in range(11)])
    samples = [
        attrs.evolve(s, outcome=Score(value=s.score, components={"form": s.score / 10}))
        for s in samples
    ]
    metrics = rollout_metrics(samples, 5)
    assert metrics["reward/components/form"] == pytest.approx(0.5)
    assert metrics["reward/component_p90/form"] == pytest.approx(0.9)
    assert (metrics["reward/p10"], metrics["reward/p90"]) == (1.0, 9.0)


@pytest.mark.parametrize(
    ("inner", "twice"), [([1.0, 0.0], False), ([1.0, 1.0], True), ([1.0, None], False)]
)
def test_a_scorers_part_of_its_own_name_is_a_metric_where_it_says_something_else(
    make_sample: Any, inner: list[float | None], twice: bool
) -> None:
    samples = []
    for number, (score, part) in enumerate(zip([1.0, 0.0], inner, strict=True)):
        parts = {"format": score, "format/length": 3.0}
        parts |= {} if part is None else {"format/format": part}
        outcome = Score(value=score, components=parts)
        samples.append(attrs.evolve(make_sample(0, number, score), outcome=outcome))
    metrics = rollout_metrics(samples, 5)
    assert {"reward/components/format", "reward/components/format/length"} <= metrics.keys()
    names = [name for name in metrics if name.endswith("/format/format")]
    assert len(names) == (4 if twice else 0)
