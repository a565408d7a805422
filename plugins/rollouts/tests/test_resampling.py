"""Estimates over k of m samples equal means over all subsets; intervals cover the true mean as often as they claim."""

from __future__ import annotations

import time
from itertools import combinations
from math import comb, isclose

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail_rollouts.resampling import (
    best_at_k,
    bootstrap_intervals,
    majority_at_k,
    pass_at_k,
    powers_up_to,
)


@st.composite
def scored_prompts(draw, largest=7):
    """Draw rows of (score, answer) pairs, some without an answer, and k."""
    sample = st.tuples(
        st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0, 3.0]), st.sampled_from([None, "a", "b", "c"])
    )
    rows = draw(st.lists(st.lists(sample, min_size=1, max_size=largest), min_size=1, max_size=4))
    return rows, draw(st.integers(1, largest + 1))


def packed(rows):
    width = max(map(len, rows))
    scores = np.full((len(rows), width), 99.0)  # values beyond a row's size are never read
    answers = np.full((len(rows), width), 0)
    for p, row in enumerate(rows):
        numbers = {None: -1}
        for i, (score, answer) in enumerate(row):
            scores[p, i] = score
            answers[p, i] = numbers.setdefault(answer, len(numbers) - 1)
    return scores, answers, np.array([len(row) for row in rows])


def over_subsets(row, k, figure):
    """Return the mean of a metric over every subset of k samples, or of all samples if there are fewer."""
    subsets = list(combinations(row, min(k, len(row))))
    return sum(figure(subset) for subset in subsets) / len(subsets)


def majority_of(row):
    def worth(answer):
        scores = [score for score, given in row if given == answer]
        return sum(scores) / len(scores)

    def figure(subset):
        votes = [answer for _, answer in subset if answer is not None]
        if not votes:
            return worth(None)
        most = max(votes.count(answer) for answer in votes)
        winners = {answer for answer in votes if votes.count(answer) == most}
        return sum(map(worth, winners)) / len(winners)

    return figure


@given(scored_prompts())
def test_best_at_k_is_the_mean_best_over_all_subsets(case):
    rows, k = case
    scores, _, sizes = packed(rows)
    expected = [over_subsets(row, k, lambda s: max(score for score, _ in s)) for row in rows]
    assert best_at_k(scores, sizes, k) == pytest.approx(expected, abs=1e-12)


@given(scored_prompts())
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_passing_sample(case):
    rows, k = case
    passed = np.array([sum(score >= 0.5 for score, _ in row) for row in rows])
    sizes = np.array([len(row) for row in rows])
    expected = [over_subsets(row, k, lambda s: any(x >= 0.5 for x, _ in s)) for row in rows]
    assert pass_at_k(passed, sizes, k) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 3000).flatmap(lambda m: st.tuples(*[st.integers(0, m)] * 2, st.just(m))))
def test_pass_at_k_is_the_papers_formula_for_any_size(case):
    c, k, m = case
    k = max(k, 1)
    exact = 1 - (comb(m - c, k) / comb(m, k) if m - c >= k else 0)
    (value,) = pass_at_k(np.array([c]), np.array([m]), k)
    assert isclose(value, exact, rel_tol=1e-9, abs_tol=1e-12)


def test_pass_at_k_keeps_its_digits_where_a_difference_of_binomials_loses_them():
    (value,) = pass_at_k(np.array([1]), np.array([10**9]), 1)
    assert value == pytest.approx(1e-9, rel=1e-12)


@given(scored_prompts(largest=6))
def test_pass_at_k_is_best_at_k_of_zeros_and_ones(case):
    rows, k = case
    scores, _, sizes = packed([[(float(s >= 0.5), a) for s, a in row] for row in rows])
    passed = np.array([sum(s >= 0.5 for s, _ in row) for row in rows])
    assert pass_at_k(passed, sizes, k) == pytest.approx(best_at_k(scores, sizes, k), abs=1e-12)


@given(scored_prompts())
def test_majority_of_one_and_of_all_is_exact(case):
    rows, _ = case
    scores, answers, sizes = packed(rows)
    one, whole = majority_at_k(scores, answers, sizes, [1, 99], np.random.default_rng(0))
    assert one == pytest.approx([np.mean([s for s, _ in row]) for row in rows], abs=1e-12)
    expected = [over_subsets(row, len(row), majority_of(row)) for row in rows]
    assert whole == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_majority_between_comes_near_the_mean_over_all_subsets(k):
    rng = np.random.default_rng(3)
    rows = [
        [(float(rng.random() < 0.4), rng.choice([None, "a", "b"])) for _ in range(6)]
        for _ in range(12)
    ]
    rows[0] = rows[0][:2]  # fewer than k: all are drawn
    scores, answers, sizes = packed(rows)
    (found,) = majority_at_k(scores, answers, sizes, [k], np.random.default_rng(0))
    expected = [over_subsets(row, k, majority_of(row)) for row in rows]
    assert found == pytest.approx(expected, abs=0.06)  # 4 standard errors of 1,024 draws
    assert found.mean() == pytest.approx(np.mean(expected), abs=0.02)


def test_equal_seeds_give_equal_draws():
    rng = np.random.default_rng(1)
    scores, answers = rng.random((50, 8)), rng.integers(-1, 3, (50, 8))
    sizes = np.full(50, 8)
    a, b = (majority_at_k(scores, answers, sizes, [4], np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(a, b)


def test_the_sizes_k_are_powers_of_two_and_n():
    assert powers_up_to(1) == [1]
    assert powers_up_to(2) == [1, 2]
    assert powers_up_to(6) == [1, 2, 4, 6]
    assert powers_up_to(8) == [1, 2, 4, 8]
    with pytest.raises(ValueError, match="n must be 1 or more"):
        powers_up_to(0)


def test_an_interval_is_that_of_means_over_prompts_drawn_anew():
    values = np.random.default_rng(0).normal(3.0, 2.0, (2, 40))
    low, high = bootstrap_intervals(values, np.random.default_rng(7), resamples=4000)
    rng = np.random.default_rng(8)
    for row, found in zip(values, zip(low, high, strict=True), strict=True):
        means = [rng.choice(row, len(row)).mean() for _ in range(4000)]
        assert found == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.05)


def test_an_interval_holds_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        sample = (rng.random((1, 100)) < 0.3).astype(float)
        low, high = bootstrap_intervals(sample, rng, resamples=300)
        hits += bool(low[0] <= 0.3 <= high[0])
    assert 175 <= hits <= 199


@pytest.mark.parametrize("prompts", [1, 5])
def test_equal_values_have_an_interval_of_no_width(prompts):
    low, high = bootstrap_intervals(np.full((1, prompts), 0.1), np.random.default_rng(0))
    assert low[0] == high[0] == pytest.approx(0.1, abs=1e-15)


def test_gsm8ks_test_set_with_sixteen_samples_takes_a_moment():
    rng = np.random.default_rng(0)
    scores, answers = rng.random((1319, 16)), rng.integers(-1, 5, (1319, 16))
    sizes = np.full(1319, 16)
    began = time.process_time()
    majority_at_k(scores, answers, sizes, powers_up_to(16), rng)
    bootstrap_intervals(rng.random((16, 1319)), rng)
    assert time.process_time() - began < 20.0
