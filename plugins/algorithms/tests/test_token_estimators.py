"""GAE, ReMax and REINFORCE++ against loops over tokens written from the papers."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces import Groups, PluginContext
from dovetail.sections import PluginSection
from dovetail_algorithms.config.estimators import GaeConfig, ReinforcePlusPlusConfig
from dovetail_algorithms.estimators.gae import GaeEstimator
from dovetail_algorithms.estimators.reinforce_plus_plus import ReinforcePlusPlusEstimator
from dovetail_algorithms.estimators.remax import RemaxEstimator
from dovetail_sdk.testing.ranks import on_ranks

numbers = st.one_of(st.floats(-5, 5, width=32), st.sampled_from([0.0, 1e30, -1e30]))
shares = st.sampled_from([0.0, 1e-4, 0.5, 0.95, 1.0])
# Each token: reward, value, and whether the policy produced it.
samples = st.lists(
    st.lists(st.tuples(numbers, numbers, st.booleans()), max_size=12), min_size=1, max_size=5
)


def packed(rows):
    """Return the batch of the rows' tokens; the greedy reward increases by 0.25 from sample to sample."""
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
    """Compute G_t = R_t + γ G_{t+1}, skipping masked tokens."""
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
    """Compute A_t = δ_t + γλ A_{t+1}, δ_t = R_t + γ V_{t+1} − V_t, skipping masked tokens."""
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


def estimate(estimator, config, batch):
    groups = Groups.of(np.arange(len(batch)))
    return estimator(config, PluginContext()).estimate(batch, groups)


def assert_equal(column, expected, batch):
    """Compare values, within the float32 rounding error of the largest number of each sample."""
    assert column.values.dtype == np.float32
    inputs = zip(batch["token_rewards"], batch["values"], strict=True)
    size = [max([1.0, *np.abs(r), *np.abs(v)]) for r, v in inputs]
    tolerance = 1e-5 * np.repeat(size, column.lengths)
    assert np.all(np.abs(column.values - expected) <= tolerance + 1e-5 * np.abs(expected))


@settings(max_examples=30, deadline=None)
@given(samples, shares, shares)
def test_gae_equals_the_recursion(rows, gamma, lam):
    batch = packed(rows)
    result = estimate(GaeEstimator, GaeConfig(gamma=gamma, lam=lam, whiten=False), batch)
    expected = slow_gae(batch, gamma, lam)
    mask = batch["response_mask"].values
    assert_equal(result.advantages, expected, batch)
    assert_equal(result.returns, np.where(mask, expected + batch["values"].values, 0), batch)


@settings(max_examples=30, deadline=None)
@given(samples, shares)
def test_whitened_gae_leaves_the_returns_alone(rows, lam):
    rows = [[(np.clip(r, -5, 5), np.clip(v, -5, 5), m) for r, v, m in row] for row in rows]
    batch = packed(rows)
    result = estimate(GaeEstimator, GaeConfig(lam=lam), batch)
    raw = slow_gae(batch, 1.0, lam)
    mask = batch["response_mask"].values
    np.testing.assert_allclose(
        result.advantages.values, slow_whiten(raw, mask), rtol=1e-3, atol=1e-2
    )
    assert_equal(result.returns, np.where(mask, raw + batch["values"].values, 0), batch)


@settings(max_examples=30, deadline=None)
@given(samples)
def test_remax_is_the_reward_to_go_less_the_greedy_reward(rows):
    batch = packed(rows)
    result = estimate(RemaxEstimator, PluginSection(), batch)
    mask = batch["response_mask"]
    greedy = np.repeat(batch["baseline_scores"], mask.lengths)
    expected = slow_returns(batch, 1.0)
    assert_equal(result.returns, expected, batch)
    assert_equal(result.advantages, np.where(mask.values, expected - greedy, 0), batch)


@settings(max_examples=30, deadline=None)
@given(samples, shares)
def test_reinforce_plus_plus_whitens_the_returns_over_the_batch(rows, gamma):
    rows = [[(np.clip(r, -5, 5), v, m) for r, v, m in row] for row in rows]
    batch = packed(rows)
    result = estimate(ReinforcePlusPlusEstimator, ReinforcePlusPlusConfig(gamma=gamma), batch)
    returns = slow_returns(batch, gamma)
    assert_equal(result.returns, returns, batch)
    expected = slow_whiten(returns, batch["response_mask"].values)
    np.testing.assert_allclose(result.advantages.values, expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("decay", [0.0, 1e-4, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("longest", [1, 300, 3000])
@pytest.mark.parametrize("own", [0.0, 0.5, 1.0])
def test_responses_of_any_length_agree_with_the_recursion(decay, longest, own):
    rng = np.random.default_rng(longest)
    offsets = np.cumsum([0, *rng.integers(0, longest + 1, 50)])
    column = lambda: Ragged(rng.normal(size=offsets[-1]).astype(np.float32), offsets)  # noqa: E731
    batch = Batch(
        {
            "token_rewards": column(),
            "values": column(),
            "response_mask": Ragged(rng.random(offsets[-1]) < own, offsets),
        }
    )
    result = estimate(GaeEstimator, GaeConfig(gamma=0.99, lam=decay, whiten=False), batch)
    expected = slow_gae(batch, 0.99, decay)
    np.testing.assert_allclose(result.advantages.values, expected, rtol=1e-6, atol=1e-6)
    result = estimate(ReinforcePlusPlusEstimator, ReinforcePlusPlusConfig(gamma=decay), batch)
    expected = slow_returns(batch, decay)
    np.testing.assert_allclose(result.returns.values, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimator", [GaeEstimator, ReinforcePlusPlusEstimator, RemaxEstimator])
def test_a_samples_returns_are_to_the_last_bit_the_same_in_any_batch(estimator):
    rng = np.random.default_rng(0)
    rows = [
        [(*rng.normal(size=2), rng.random() < 0.8) for _ in range(rng.integers(0, 40))]
        for _ in range(12)
    ]
    batch = packed(rows)
    whole = estimate(estimator, estimator.Config(), batch).returns
    order = rng.permutation(12)
    shuffled = estimate(estimator, estimator.Config(), batch.take(order)).returns
    assert shuffled.equals(whole.take(order))
    for row in range(12):
        alone = estimate(estimator, estimator.Config(), batch.slice(row, row + 1)).returns
        assert alone.equals(whole.slice(row, row + 1))


def test_tool_tokens_take_no_time_and_their_rewards_and_values_do_not_count():
    batch = packed([[(0.0, 1.0, True), (9.0, 9.0, False), (1.0, 2.0, True)]])
    result = estimate(GaeEstimator, GaeConfig(gamma=0.5, lam=1.0, whiten=False), batch)
    # δ_2 = 1 − 2; δ_0 = 0.5 · 2 − 1.
    assert result.advantages.values.tolist() == [-0.5, 0.0, -1.0]
    assert result.returns.values.tolist() == [0.5, 0.0, 1.0]


def test_whitening_is_done_over_the_ranks_together():
    rows = [[(1.0, 0.0, True)], [(3.0, 0.0, True), (4.0, 0.0, True), (9.0, 0.0, False)], []]
    config = ReinforcePlusPlusConfig()
    whole = estimate(ReinforcePlusPlusEstimator, config, packed(rows)).advantages

    def part(rank, reduction):
        batch = packed([rows[rank]])
        estimator = ReinforcePlusPlusEstimator(config, PluginContext(reduction=reduction))
        return estimator.estimate(batch, Groups.of(np.zeros(1))).advantages.values

    parts = on_ranks(3, part)
    np.testing.assert_allclose(np.concatenate(parts), whole.values, rtol=1e-5)


def test_long_responses_do_not_underflow():
    length, count = 20_000, 10
    mask = Ragged(np.ones(length * count, np.bool_), np.arange(count + 1) * length)
    rewards_T = np.zeros(length * count, np.float32)
    rewards_T[mask.offsets[1:] - 1] = 1.0
    batch = Batch({"token_rewards": mask.with_values(rewards_T), "response_mask": mask})
    result = estimate(ReinforcePlusPlusEstimator, ReinforcePlusPlusConfig(gamma=0.9), batch)
    np.testing.assert_allclose(result.returns.values[mask.offsets[1:] - 3], 0.81, rtol=1e-6)
    np.testing.assert_allclose(result.returns.values[0], 0.9 ** (length - 1), atol=1e-30)


def test_equal_returns_are_no_signal():
    batch = packed([[(0.0, 0.0, True), (0.1, 0.0, True)], [(0.1, 0.0, True)]])
    result = estimate(ReinforcePlusPlusEstimator, ReinforcePlusPlusConfig(), batch)
    assert np.all(result.advantages.values == 0)
    assert result.returns.values == pytest.approx([0.1, 0.1, 0.1])


@pytest.mark.parametrize(
    ("estimator", "missing"), [(GaeEstimator, "values"), (RemaxEstimator, "baseline_scores")]
)
def test_a_missing_column_names_who_needs_it(estimator, missing):
    batch = packed([[(1.0, 1.0, True)]]).drop([missing])
    with pytest.raises(ColumnError, match=rf"{estimator.name}(.|\n)*{missing}"):
        estimate(estimator, estimator.Config(), batch)


@pytest.mark.parametrize("name", ["gamma", "lam"])
@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_discounts_are_shares(name, value):
    with pytest.raises(ValueError, match=name):
        GaeConfig(**{name: value})
