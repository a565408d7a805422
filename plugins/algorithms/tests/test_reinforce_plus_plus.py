"""REINFORCE++, against a loop over tokens written from the paper."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import Groups, PluginContext
from dovetail_algorithms.config.estimators import ReinforcePlusPlusConfig
from dovetail_algorithms.estimators.discounted import discounted_returns
from dovetail_algorithms.estimators.reinforce_plus_plus import ReinforcePlusPlus

samples = st.lists(
    st.lists(st.tuples(st.floats(-5, 5), st.booleans()), max_size=12), min_size=1, max_size=5
)


def packed(rows):
    rewards = Ragged.from_list([[r for r, _ in row] for row in rows], dtype=np.float32)
    mask = Ragged.from_list([[m for _, m in row] for row in rows], dtype=bool)
    return rewards, mask


def slow_returns(rewards, mask, gamma):
    """G_t = R_t + γ G_{t+1}; a masked token hands on what comes after it."""
    returns = []
    for row_rewards, row_mask in zip(rewards, mask, strict=True):
        row, later = [], 0.0
        for reward, kept in zip(row_rewards[::-1], row_mask[::-1], strict=True):
            if kept:
                later = float(reward) + gamma * later
            row.append(later if kept else 0.0)
        returns += row[::-1]
    return np.array(returns)


@given(samples, st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_returns_equal_the_recursion(rows, gamma):
    rewards, mask = packed(rows)
    returns_T = discounted_returns(rewards.values, mask.values, mask.offsets, gamma)
    np.testing.assert_allclose(returns_T, slow_returns(rewards, mask, gamma), rtol=1e-6, atol=1e-6)


@given(samples, st.sampled_from([0.9, 1.0]))
def test_advantages_are_returns_whitened_over_the_batch(rows, gamma):
    rewards, mask = packed(rows)
    estimator = ReinforcePlusPlus(ReinforcePlusPlusConfig(gamma=gamma), PluginContext())
    batch = Batch({"token_rewards": rewards, "response_mask": mask})
    result = estimator.estimate(batch, Groups.of(np.arange(len(rows))))
    returns = slow_returns(rewards, mask, gamma)
    chosen = returns[mask.values]
    if chosen.size:
        var = chosen.var(ddof=1) if chosen.size > 1 else 0.0
        returns = np.where(mask.values, (returns - chosen.mean()) / np.sqrt(var + 1e-8), 0)
    assert result.advantages.values.dtype == np.float32
    np.testing.assert_allclose(result.advantages.values, returns, rtol=1e-3, atol=1e-3)


def test_rewards_on_masked_tokens_are_ignored():
    returns_T = discounted_returns(
        np.array([0.0, 9.0, 1.0]), np.array([True, False, True]), np.array([0, 3]), 0.5
    )
    assert returns_T.tolist() == [0.5, 0.0, 1.0]


def test_long_responses_neither_overflow_nor_take_long():
    length, count = 20_000, 10
    offsets = np.arange(count + 1) * length
    rewards_T = np.zeros(length * count)
    rewards_T[offsets[1:] - 1] = 1.0
    begin = time.perf_counter()
    returns_T = discounted_returns(rewards_T, np.ones(len(rewards_T), bool), offsets, 0.9)
    assert time.perf_counter() - begin < 5
    assert np.all(np.isfinite(returns_T))
    np.testing.assert_allclose(returns_T[offsets[1:] - 3], 0.81)
    np.testing.assert_allclose(returns_T[0], 0.9 ** (length - 1), atol=1e-300)


def test_equal_returns_are_no_signal():
    rewards = Ragged.from_list([[0.0, 0.1], [0.1]], dtype=np.float32)
    mask = rewards.with_values(np.ones(3, bool))
    estimator = ReinforcePlusPlus(ReinforcePlusPlusConfig(), PluginContext())
    result = estimator.estimate(
        Batch({"token_rewards": rewards, "response_mask": mask}), Groups.of(np.array([0, 1]))
    )
    assert np.all(result.advantages.values == 0)
    assert result.metrics["advantage/zero_signal_groups"] == 1.0
    assert result.returns.values == pytest.approx([0.1, 0.1, 0.1])
