"""GAE, ReMax and REINFORCE++, compiled and in NumPy, against loops over tokens written from the papers."""

import contextlib
import time
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces import Groups, PluginContext
from dovetail_algorithms.config.estimators import GaeConfig, ReinforcePlusPlusConfig, RemaxConfig
from dovetail_algorithms.estimators import scans, scans_eager
from dovetail_algorithms.estimators.gae import Gae
from dovetail_algorithms.estimators.reinforce_plus_plus import ReinforcePlusPlus
from dovetail_algorithms.estimators.remax import Remax
from dovetail_sdk.testing.ranks import on_ranks

scans_compiled = pytest.importorskip("dovetail_algorithms.estimators.scans_compiled")
by_scans = pytest.mark.parametrize("kind", ["compiled", "eager"])

numbers = st.one_of(st.floats(-5, 5, width=32), st.sampled_from([0.0, 1e30, -1e30]))
shares = st.sampled_from([0.0, 1e-4, 0.5, 0.95, 1.0])
# Of every token its reward, its value, and whether the policy wrote it.
samples = st.lists(
    st.lists(st.tuples(numbers, numbers, st.booleans()), max_size=12), min_size=1, max_size=5
)


@contextlib.contextmanager
def using(kind):
    """The compiled scans, or those in NumPy with blocks so small that there are several."""
    with (
        mock.patch.object(
            scans, "compiled", return_value=scans_compiled if kind == "compiled" else None
        ),
        mock.patch.object(scans_eager, "BLOCK", 8 if kind == "eager" else scans_eager.BLOCK),
    ):
        yield


def packed(rows):
    """Batch of the rows' tokens, with a greedy reward of 0.25 more a sample."""
    columns = zip(*[token for row in rows for token in row], strict=True)
    rewards, values, mask = list(columns) or ([], [], [])
    offsets = np.cumsum([0, *map(len, rows)])
    return Batch(
        {
            "token_rewards": Ragged(np.array(rewards, np.float32), offsets),
            "values": Ragged(np.array(values, np.float32), offsets),
            "response_mask": Ragged(np.array(mask, bool), offsets),
            "baseline_scores": 0.25 * np.arange(len(rows), dtype=np.float32),
        }
    )


def slow_returns(batch, gamma):
    """G_t = R_t + γ G_{t+1}; a masked token hands on what comes after it."""
    returns = []
    for rewards, mask in zip(batch["token_rewards"], batch["response_mask"], strict=True):
        row, later = [], 0.0
        for reward, kept in zip(rewards[::-1], mask[::-1], strict=True):
            if kept:
                later = float(reward) + gamma * later
            row.append(later if kept else 0.0)
        returns += row[::-1]
    return np.array(returns)


def slow_gae(batch, gamma, lam):
    """A_t = δ_t + γλ A_{t+1}, δ_t = R_t + γ V_{t+1} − V_t; a masked token hands both on."""
    advantages = []
    columns = (batch["token_rewards"], batch["values"], batch["response_mask"])
    for rewards, values, mask in zip(*columns, strict=True):
        row, later, next_value = [], 0.0, 0.0
        for reward, value, kept in list(zip(rewards, values, mask, strict=True))[::-1]:
            if kept:
                delta = float(reward) + gamma * next_value - float(value)
                later, next_value = delta + gamma * lam * later, float(value)
            row.append(later if kept else 0.0)
        advantages += row[::-1]
    return np.array(advantages)


def slow_whiten(values, mask):
    chosen = values[mask]
    if not chosen.size:
        return np.zeros_like(values)
    var = chosen.var(ddof=1) if chosen.size > 1 else 0.0
    return np.where(mask, (values - chosen.mean()) / np.sqrt(var + 1e-8), 0)


def estimate(estimator, config, batch, kind):
    with using(kind):
        groups = Groups.of(np.arange(len(batch)))
        return estimator(config, PluginContext()).estimate(batch, groups)


def assert_equal(column, expected, batch):
    """Within float32 rounding of the largest number of the token's own sample."""
    assert column.values.dtype == np.float32
    inputs = zip(batch["token_rewards"], batch["values"], strict=True)
    size = [max([1.0, *np.abs(r), *np.abs(v)]) for r, v in inputs]
    tolerance = 1e-5 * np.repeat(size, column.lengths)
    assert np.all(np.abs(column.values - expected) <= tolerance + 1e-5 * np.abs(expected))


@by_scans
@settings(max_examples=30, deadline=None)
@given(samples, shares, shares)
def test_gae_equals_the_recursion(kind, rows, gamma, lam):
    batch = packed(rows)
    result = estimate(Gae, GaeConfig(gamma=gamma, lam=lam, whiten=False), batch, kind)
    expected = slow_gae(batch, gamma, lam)
    mask = batch["response_mask"].values
    assert_equal(result.advantages, expected, batch)
    assert_equal(result.returns, np.where(mask, expected + batch["values"].values, 0), batch)


@by_scans
@settings(max_examples=30, deadline=None)
@given(samples, shares)
def test_whitened_gae_leaves_the_returns_alone(kind, rows, lam):
    rows = [[(np.clip(r, -5, 5), np.clip(v, -5, 5), m) for r, v, m in row] for row in rows]
    batch = packed(rows)
    result = estimate(Gae, GaeConfig(lam=lam), batch, kind)
    raw = slow_gae(batch, 1.0, lam)
    mask = batch["response_mask"].values
    np.testing.assert_allclose(
        result.advantages.values, slow_whiten(raw, mask), rtol=1e-3, atol=1e-2
    )
    assert_equal(result.returns, np.where(mask, raw + batch["values"].values, 0), batch)


@by_scans
@settings(max_examples=30, deadline=None)
@given(samples)
def test_remax_is_the_reward_to_go_less_the_greedy_reward(kind, rows):
    batch = packed(rows)
    result = estimate(Remax, RemaxConfig(), batch, kind)
    mask = batch["response_mask"]
    greedy = np.repeat(batch["baseline_scores"], mask.lengths)
    expected = slow_returns(batch, 1.0)
    assert_equal(result.returns, expected, batch)
    assert_equal(result.advantages, np.where(mask.values, expected - greedy, 0), batch)


@by_scans
@settings(max_examples=30, deadline=None)
@given(samples, shares)
def test_reinforce_plus_plus_whitens_the_returns_over_the_batch(kind, rows, gamma):
    rows = [[(np.clip(r, -5, 5), v, m) for r, v, m in row] for row in rows]
    batch = packed(rows)
    result = estimate(ReinforcePlusPlus, ReinforcePlusPlusConfig(gamma=gamma), batch, kind)
    returns = slow_returns(batch, gamma)
    assert_equal(result.returns, returns, batch)
    expected = slow_whiten(returns, batch["response_mask"].values)
    np.testing.assert_allclose(result.advantages.values, expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("decay", [0.0, 1e-4, 0.01, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("longest", [1, 40, 300, 3000])
@pytest.mark.parametrize("own", [0.0, 0.5, 0.97, 1.0])
def test_both_kinds_of_scans_agree_on_responses_of_any_length(decay, longest, own):
    rng = np.random.default_rng(longest)
    offsets = np.cumsum([0, *rng.integers(0, longest + 1, 50)])
    rewards_T = rng.normal(size=offsets[-1]).astype(np.float32)
    values_T = rng.normal(size=offsets[-1]).astype(np.float32)
    mask_T = rng.random(offsets[-1]) < own
    results = []
    for kind in ("compiled", "eager"):
        with using(kind), mock.patch.object(scans_eager, "BLOCK", 5000):
            results.append(
                (
                    scans.discounted_returns(rewards_T, mask_T, offsets, decay),
                    *scans.gae(rewards_T, values_T, mask_T, offsets, 0.99, decay),
                )
            )
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
        assert np.all(one[~mask_T] == 0)
    batch = Batch(
        {
            "token_rewards": Ragged(rewards_T, offsets),
            "response_mask": Ragged(mask_T, offsets),
        }
    )
    np.testing.assert_allclose(results[0][0], slow_returns(batch, decay), rtol=1e-4, atol=1e-4)


@by_scans
def test_tool_tokens_take_no_time_and_their_rewards_and_values_do_not_count(kind):
    batch = packed([[(0.0, 1.0, True), (9.0, 9.0, False), (1.0, 2.0, True)]])
    result = estimate(Gae, GaeConfig(gamma=0.5, lam=1.0, whiten=False), batch, kind)
    # δ_2 = 1 − 2; δ_0 = 0.5 · 2 − 1.
    assert result.advantages.values.tolist() == [-0.5, 0.0, -1.0]
    assert result.returns.values.tolist() == [0.5, 0.0, 1.0]


@by_scans
def test_whitening_is_done_over_the_ranks_together(kind):
    rows = [[(1.0, 0.0, True)], [(3.0, 0.0, True), (4.0, 0.0, True), (9.0, 0.0, False)], []]
    config = ReinforcePlusPlusConfig()
    whole = estimate(ReinforcePlusPlus, config, packed(rows), kind).advantages

    def part(rank, reduction):
        batch = packed([rows[rank]])
        estimator = ReinforcePlusPlus(config, PluginContext(reduction=reduction))
        return estimator.estimate(batch, Groups.of(np.zeros(1))).advantages.values

    with using(kind):
        parts = on_ranks(3, part)
    np.testing.assert_allclose(np.concatenate(parts), whole.values, rtol=1e-5)


@by_scans
def test_long_responses_neither_overflow_nor_take_long(kind):
    length, count = 20_000, 10
    offsets = np.arange(count + 1) * length
    rewards_T = np.zeros(length * count, np.float32)
    rewards_T[offsets[1:] - 1] = 1.0
    mask_T = np.ones(len(rewards_T), bool)
    with mock.patch.object(
        scans, "compiled", return_value=scans_compiled if kind == "compiled" else None
    ):
        scans.discounted_returns(rewards_T[:5], mask_T[:5], np.array([0, 5]), 0.9)
        begin = time.process_time()
        returns_T = scans.discounted_returns(rewards_T, mask_T, offsets, 0.9)
    assert time.process_time() - begin < 30
    np.testing.assert_allclose(returns_T[offsets[1:] - 3], 0.81, rtol=1e-6)
    np.testing.assert_allclose(returns_T[0], 0.9 ** (length - 1), atol=1e-30)


@by_scans
def test_equal_returns_are_no_signal(kind):
    batch = packed([[(0.0, 0.0, True), (0.1, 0.0, True)], [(0.1, 0.0, True)]])
    result = estimate(ReinforcePlusPlus, ReinforcePlusPlusConfig(), batch, kind)
    assert np.all(result.advantages.values == 0)
    assert result.returns.values == pytest.approx([0.1, 0.1, 0.1])


def test_results_do_not_depend_on_the_number_of_threads():
    rng = np.random.default_rng(0)
    offsets = np.cumsum([0, *rng.integers(0, 3000, 300)])
    rewards_T = rng.normal(size=offsets[-1]).astype(np.float32)
    mask_T = rng.random(offsets[-1]) < 0.9
    results = []
    for processors in (1, 3):
        with mock.patch("dovetail_algorithms.estimators.parts._processors", lambda n=processors: n):
            returns_T = scans.discounted_returns(rewards_T, mask_T, offsets, 0.99)
            results.append((returns_T, scans_compiled.moments(returns_T, mask_T)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize(("estimator", "missing"), [(Gae, "values"), (Remax, "baseline_scores")])
def test_a_missing_column_names_who_needs_it(estimator, missing):
    batch = packed([[(1.0, 1.0, True)]]).drop([missing])
    with pytest.raises(ColumnError, match=rf"{estimator.name}(.|\n)*{missing}"):
        estimate(estimator, estimator.Config(), batch, "eager")


@pytest.mark.parametrize("name", ["gamma", "lam"])
@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_discounts_are_shares(name, value):
    with pytest.raises(ValueError, match=name):
        GaeConfig(**{name: value})
