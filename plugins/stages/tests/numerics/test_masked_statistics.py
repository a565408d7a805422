"""Masked moments and whitening, against slow loops."""

import math

import numpy as np
from hypothesis import given, strategies as st

from dovetail_stages import whiten
from dovetail_stages.numerics.masked import weighted_moments

values_and_masks = st.lists(
    st.tuples(st.floats(-1e3, 1e3, allow_nan=False), st.booleans()), max_size=40
)


def arrays(rows):
    values_T = np.array([value for value, _ in rows], np.float32)
    return values_T, np.array([kept for _, kept in rows], bool)


class TwoRanks:
    """A reduction that adds up the values of both halves of a batch, call by call."""

    def __init__(self, other):
        self.other = iter(other)

    def sum(self, values):
        return values + next(self.other)


@given(values_and_masks)
def test_moments_equal_a_slow_loop(rows):
    values_T, mask_T = arrays(rows)
    chosen = [float(v) for v, m in zip(values_T, mask_T, strict=True) if m]
    mean = math.fsum(chosen) / len(chosen) if chosen else 0.0
    var = math.fsum((v - mean) ** 2 for v in chosen) / (len(chosen) - 1) if len(chosen) > 1 else 0.0
    assert weighted_moments(values_T, mask_T).mean == np.float64(mean) or math.isclose(
        weighted_moments(values_T, mask_T).mean, mean, rel_tol=1e-9, abs_tol=1e-9
    )
    assert math.isclose(weighted_moments(values_T, mask_T).var, var, rel_tol=1e-9, abs_tol=1e-9)


@given(values_and_masks)
def test_whitened_values_have_mean_0_and_variance_at_most_1(rows):
    values_T, mask_T = arrays(rows)
    white_T = whiten(values_T, mask_T)
    assert white_T.dtype == np.float32
    assert np.all(white_T[~mask_T] == 0)
    assert abs(weighted_moments(white_T, mask_T).mean) < 1e-4
    if weighted_moments(values_T, mask_T).var > 1e-3:
        assert math.isclose(weighted_moments(white_T, mask_T).var, 1.0, rel_tol=1e-3)


def test_equal_values_whiten_to_exactly_0():
    assert np.all(whiten(np.full(7, 0.1), np.ones(7, bool)) == 0)


def test_what_the_mask_leaves_out_may_hold_anything():
    values_T = np.array([1.0, np.nan, 3.0, np.inf])
    mask_T = np.array([True, False, True, False])
    assert weighted_moments(values_T, mask_T).mean == 2.0
    assert np.all(np.isfinite(whiten(values_T, mask_T)))


def test_a_large_mean_costs_no_precision():
    values_T = 1e9 + np.array([0.0, 1.0, 2.0])
    assert math.isclose(weighted_moments(values_T, np.ones(3, bool)).var, 1.0, rel_tol=1e-9)


def test_two_ranks_together_give_the_moments_of_the_whole():
    whole = np.arange(10.0)
    mask = np.ones(10, bool)
    expected = weighted_moments(whole, mask)
    mine, theirs = whole[:3], whole[3:]
    other = [
        np.array([len(theirs), theirs.sum()]),
        np.array([np.square(theirs - expected.mean).sum()]),
    ]
    assert weighted_moments(mine, mask[:3], TwoRanks(other)) == expected
