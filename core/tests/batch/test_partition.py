"""Balanced partitions: every sample once, units whole, loads within the heaviest unit of one another."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.batch.partition import balanced_partition, token_counts
from dovetail.errors import ColumnError

calm = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
"""For machines that others use as well."""


@st.composite
def problems(draw, max_size: int = 30):
    """Weights and unit ids."""
    weights = draw(st.lists(st.integers(0, 50), max_size=max_size))
    size = len(weights)
    units = draw(st.none() | st.lists(st.integers(-3, 8), min_size=size, max_size=size))
    return np.array(weights, np.int64), None if units is None else np.array(units, np.int64)


def unit_weights(weights_N, units_N) -> np.ndarray:
    if units_N is None:
        return weights_N
    return np.array([weights_N[units_N == unit].sum() for unit in np.unique(units_N)])


def check_cover(parts, weights_N, units_N) -> None:
    whole = np.concatenate([np.empty(0, np.int64), *parts])
    assert sorted(whole.tolist()) == list(range(len(weights_N)))
    for part in parts:
        assert part.dtype == np.int64
        assert part.tolist() == sorted(part.tolist())
    if units_N is not None:
        homes = [set(units_N[part].tolist()) for part in parts]
        assert sum(map(len, homes)) == len(set(units_N.tolist()))


@calm
@given(problems(), st.integers(1, 9))
def test_every_sample_once_units_whole_and_loads_balanced(problem, parts):
    weights_N, units_N = problem
    found = balanced_partition(weights_N, parts, units_N)
    assert len(found) == parts
    check_cover(found, weights_N, units_N)
    units = unit_weights(weights_N, units_N)
    loads = [int(weights_N[part].sum()) for part in found]
    assert max(loads) - min(loads) <= (units.max() if len(units) else 0)
    assert sum(len(part) > 0 for part in found) == min(parts, len(units))
    firsts = [int(part[0]) for part in found if len(part)]
    assert firsts == sorted(firsts)


@calm
@given(problems(), st.integers(1, 5))
def test_the_same_problem_has_the_same_answer(problem, parts):
    once, again = (
        balanced_partition(*_with(problem, parts)),
        balanced_partition(*_with(problem, parts)),
    )
    assert [part.tolist() for part in once] == [part.tolist() for part in again]


def _with(problem, parts):
    return problem[0].copy(), parts, problem[1]


@calm
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(2, 3))
def test_it_comes_close_to_the_best_of_all_partitions(weights, parts):
    best = min(
        max(
            sum(w for w, place in zip(weights, places, strict=True) if place == k)
            for k in range(parts)
        )
        for places in itertools.product(range(parts), repeat=len(weights))
    )
    found = balanced_partition(np.array(weights), parts)
    assert max(sum(weights[i] for i in part) for part in found) <= best * 4 / 3


def test_long_and_short_samples_are_balanced_closely():
    weights_N = np.random.default_rng(0).lognormal(6, 1, 512).astype(np.int64)
    loads = [weights_N[part].sum() for part in balanced_partition(weights_N, 8)]
    assert (max(loads) - min(loads)) / np.mean(loads) < 0.001


@pytest.mark.parametrize("parts", [2, 7, 64])
def test_thousands_of_samples_are_divided_closely(parts):
    weights = np.ceil(np.random.default_rng(0).lognormal(6, 1, 8000))
    divided = balanced_partition(weights, parts)
    assert sorted(np.concatenate(divided).tolist()) == list(range(8000))
    loads = [weights[part].sum() for part in divided]
    assert max(loads) - min(loads) <= 0.001 * np.mean(loads)


def test_equal_weights_give_equal_counts():
    assert [len(part) for part in balanced_partition(np.zeros(12), 4)] == [3, 3, 3, 3]
    assert [len(part) for part in balanced_partition(np.ones(5), 2)] in ([3, 2], [2, 3])


@pytest.mark.parametrize(
    ("weights", "parts", "units", "message"),
    [
        ([1, -1], 2, None, "finite numbers ≥ 0"),
        ([1, np.nan], 2, None, "finite numbers ≥ 0"),
        ([[1]], 2, None, "finite numbers ≥ 0"),
        ([1, 2], 0, None, "into 0 parts"),
        ([1, 2], 2, [1], r"unit.* \(1,\).* \(2,\)"),
    ],
)
def test_what_makes_no_sense_is_refused(weights, parts, units, message):
    with pytest.raises(ColumnError, match=message):
        balanced_partition(np.array(weights), parts, None if units is None else np.array(units))


def test_tokens_of_prompt_and_response_count():
    prompt, response = Ragged.from_list([[1], [1, 2]]), Ragged.from_list([[5, 6, 7], [8]])
    other = Ragged.from_list([[0.5] * 9, []], np.float32)
    assert token_counts(Batch({"prompt_ids": prompt, "response_ids": response})).tolist() == [4, 3]
    assert token_counts(Batch({"response_ids": response, "x": other})).tolist() == [3, 1]
    assert token_counts(Batch({"x": other, "y": prompt})).tolist() == [9, 2]
    assert token_counts(Batch({"scores": np.zeros(2)})).tolist() == [1, 1]
