"""The optimal token baselines against a loop over groups and positions."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import Groups, PluginContext
from dovetail_algorithms.estimators.optimal_token_baseline import (
    OptimalTokenBaselineEstimator,
    TirOptimalTokenBaselineEstimator,
)

by_estimator = pytest.mark.parametrize(
    "estimator", [OptimalTokenBaselineEstimator, TirOptimalTokenBaselineEstimator]
)

# Each token: reward, probability p of the chosen token, share of the largest Σπ² that the other tokens can have, and weight.
tokens = st.tuples(
    st.one_of(st.floats(-5, 5, width=32), st.sampled_from([0.0, 1.0, 1e20])),
    st.sampled_from([0.1, 0.5, 0.9]),
    st.floats(0, 1),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.booleans(),
)
# Each sample: group and tokens.
samples = st.lists(
    st.tuples(st.integers(0, 2), st.lists(tokens, max_size=7)), min_size=1, max_size=9
)


def packed(rows, weighted):
    offsets = np.cumsum([0, *(len(row) for _, row in rows)])
    flat = [token for _, row in rows for token in row]
    rewards, pi, share, weights, mask = (
        np.array([token[i] for token in flat], np.float64) for i in range(5)
    )
    columns = {
        "token_rewards": Ragged(rewards.astype(np.float32), offsets),
        "response_mask": Ragged(mask.astype(bool), offsets),
        "old_log_probs": Ragged(np.log(pi).astype(np.float32), offsets),
        "sum_pi_squared": Ragged((pi**2 + share * (1 - pi) ** 2).astype(np.float32), offsets),
    }
    if weighted:
        columns["rollout_is_weights"] = Ragged(weights.astype(np.float32), offsets)
    return Batch(columns)


def oracle(batch, group_ids, compact):
    """Compute the advantages of each sample, position by position."""
    paths = [one_path(batch, i, compact) for i in range(len(batch))]
    expected = []
    for i, group in enumerate(group_ids):
        members = [j for j, other in enumerate(group_ids) if other == group]
        lengths = sorted(max(paths[j], default=-1) + 1 for j in members)
        own = np.zeros(len(batch["response_mask"][i]))
        for place, (at, to_go, _) in paths[i].items():
            there = [paths[j][place] for j in members if place in paths[j]]
            baseline = sum(g * w for _, g, w in there) / (sum(w for _, _, w in there) + 1e-8)
            if len(members) > 1:
                own[at] = to_go - (baseline if place < lengths[-2] else 0.0)
        expected.append(own)
    return expected


def one_path(batch, i, compact):
    """Return, by position, the token's index, the sum of rewards from the token on, and the energy up to the token."""
    mask = batch["response_mask"][i]
    energy, path = 0.0, {}
    for t in np.flatnonzero(mask):
        pi = np.exp(float(batch["old_log_probs"][i][t]))
        step = 1 - 2 * pi + float(batch["sum_pi_squared"][i][t])
        if "rollout_is_weights" in batch:
            step *= float(batch["rollout_is_weights"][i][t]) ** 2
        energy += step
        to_go = sum(float(batch["token_rewards"][i][s]) for s in np.flatnonzero(mask) if s >= t)
        path[len(path) if compact else t] = (t, to_go, energy)
    return path


def estimate(estimator, batch, groups):
    return estimator(estimator.Config(), PluginContext()).estimate(batch, groups)


@by_estimator
@given(samples, st.booleans())
def test_advantages_equal_the_formula(estimator, rows, weighted):
    batch = packed(rows, weighted)
    ids = [group for group, _ in rows]
    result = estimate(estimator, batch, Groups.of(np.array(ids)))
    expected = oracle(batch, ids, estimator is TirOptimalTokenBaselineEstimator)
    largest = [
        max([1.0, *(abs(token[0]) for other, row in rows for token in row if other == group)])
        for group in ids
    ]
    for got, want, size in zip(result.advantages, expected, largest, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * size)
    alone = sum(ids.count(group) == 1 for group in set(ids))
    assert result.metrics["advantage/singleton_groups"] == alone
    silent = [
        not any(expected[i].any() for i, other in enumerate(ids) if other == group)
        for group in set(ids)
    ]
    # Rounding can make an advantage that is 0 by the formula slightly different from 0.
    assert result.metrics["advantage/zero_signal_groups"] <= np.mean(silent) + 1e-9


@by_estimator
@pytest.mark.parametrize("own", [0.9, 1.0])
def test_long_responses_in_any_order_agree_with_the_formula(estimator, own):
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.repeat(np.arange(4), 3))
    rows = [
        (
            group,
            list(
                zip(
                    rng.normal(size=n).tolist(),
                    rng.uniform(0.1, 0.9, n).tolist(),
                    rng.random(n).tolist(),
                    rng.uniform(0.5, 2, n).tolist(),
                    (rng.random(n) < own).tolist(),
                    strict=True,
                )
            ),
        )
        for group, n in zip(ids, rng.integers(0, 150, len(ids)), strict=True)
    ]
    batch = packed(rows, weighted=True)
    result = estimate(estimator, batch, Groups.of(ids))
    expected = oracle(batch, ids.tolist(), estimator is TirOptimalTokenBaselineEstimator)
    for got, want in zip(result.advantages, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@by_estimator
def test_sequences_of_one_trajectory_weigh_as_one(estimator):
    row = [(1.0, 0.5, 0.5, 1.0, True), (0.0, 0.9, 0.5, 1.0, True)]
    other = [(0.0, 0.1, 0.5, 1.0, True), (0.5, 0.5, 0.2, 1.0, True)]
    once = packed([(0, row), (0, other)], weighted=False)
    thrice = packed([(0, row), (0, row), (0, other), (0, row)], weighted=False)
    expected = estimate(estimator, once, Groups.of(np.zeros(2))).advantages
    groups = Groups.of(np.zeros(4), np.array([7, 7, 8, 7]))
    got = estimate(estimator, thrice, groups).advantages
    for i, j in enumerate([0, 0, 1, 0]):
        np.testing.assert_allclose(got[i], expected[j], rtol=1e-5, atol=1e-6)


def test_tool_tokens_shift_positions_only_where_they_count():
    token, tool = (1.0, 0.5, 0.5, 1.0, True), (0.0, 0.5, 0.5, 1.0, False)
    batch = packed([(0, [token, tool, tool, token]), (0, [token, token])], weighted=False)
    groups = Groups.of(np.zeros(2))
    tir = estimate(TirOptimalTokenBaselineEstimator, batch, groups).advantages
    np.testing.assert_allclose(np.concatenate(list(tir)), 0.0, atol=1e-6)
    plain = estimate(OptimalTokenBaselineEstimator, batch, groups).advantages
    # Beyond the second longest response there is no baseline. A token alone at its position would be its own baseline.
    np.testing.assert_allclose(plain[0], [0.0, 0.0, 0.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(plain[1], [0.0, 0.0], atol=1e-6)
