"""Estimators that compare the samples of one prompt, against loops written from the papers."""

import statistics

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces import Groups, PluginContext
from dovetail_algorithms.config.estimators import GrpoConfig, GrpoPasskConfig
from dovetail_algorithms.estimators.dr_grpo import DrGrpoEstimator
from dovetail_algorithms.estimators.gpg import GpgEstimator
from dovetail_algorithms.estimators.grpo import GrpoEstimator
from dovetail_algorithms.estimators.grpo_passk import GrpoPasskEstimator
from dovetail_algorithms.estimators.opo import OpoEstimator
from dovetail_algorithms.estimators.reinforce_plus_plus_baseline import (
    ReinforcePlusPlusBaselineEstimator,
)
from dovetail_algorithms.estimators.rloo import RlooEstimator
from dovetail_algorithms.estimators.score import ScoreEstimator


def made(estimator, config=None):
    return estimator(config or estimator.Config(), PluginContext())


ESTIMATORS = {
    "grpo": made(GrpoEstimator),
    "grpo_no_std": made(GrpoEstimator, GrpoConfig(norm_by_std=False)),
    "grpo_raw": made(GrpoEstimator, GrpoConfig(singleton="raw")),
    "dr_grpo": made(DrGrpoEstimator),
    "rloo": made(RlooEstimator),
    "opo": made(OpoEstimator),
    "gpg": made(GpgEstimator),
    "grpo_passk": made(GrpoPasskEstimator),
    "grpo_passk_std": made(GrpoPasskEstimator, GrpoPasskConfig(norm_by_std=True)),
    "reinforce_plus_plus_baseline": made(ReinforcePlusPlusBaselineEstimator),
}
by_name = pytest.mark.parametrize("name", ESTIMATORS)
singletons_are_0 = pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "grpo_raw"])

rewards = st.one_of(
    st.sampled_from([0.0, 0.1, 1.0, -1.0]),
    st.floats(-100, 100, width=32),
    st.sampled_from([1e30, -1e30]),
)
masks = st.lists(st.booleans(), max_size=5)
# A trajectory: its group, its reward, and the response mask of each of its sequences.
trajectories = st.lists(
    st.tuples(st.integers(0, 4), rewards, st.lists(masks, min_size=1, max_size=3)),
    min_size=1,
    max_size=16,
)


def oracle(name, rows):
    """Compute each trajectory's advantage in a plain loop."""
    advantages = [one_advantage(name, rows, i) for i in range(len(rows))]
    return whiten_tokens(rows, advantages) if name == "reinforce_plus_plus_baseline" else advantages


def one_advantage(name, rows, i):
    group, reward, _ = rows[i]
    members = [row for row in rows if row[0] == group]
    member_rewards = [r for _, r, _ in members]
    others = [r for j, (g, r, _) in enumerate(rows) if g == group and j != i]
    if not others:
        return reward if name == "grpo_raw" else 0.0
    centred = reward - statistics.fmean(member_rewards)
    if len(set(member_rewards)) == 1:
        return 0.0
    match name:
        case "grpo" | "grpo_raw":
            return centred / (statistics.stdev(member_rewards) + 1e-6)
        case "rloo":
            return reward - statistics.fmean(others)
        case "opo":
            tokens = [length(row) for row in members]
            if not sum(tokens):
                return centred
            return reward - sum(n * r for n, r in zip(tokens, member_rewards, strict=True)) / sum(
                tokens
            )
        case "gpg":
            informative = sum(len({r for g, r, _ in rows if g == row[0]}) > 1 for row in rows)
            return centred * len(rows) / informative
        case "grpo_passk" | "grpo_passk_std":
            best, second = sorted(member_rewards, reverse=True)[:2]
            lead = best - second if reward == best else 0.0
            return lead / (statistics.stdev(member_rewards) + 1e-6) if "std" in name else lead
    return centred


def length(row):
    return sum(sum(mask) for mask in row[2])


def whiten_tokens(rows, advantages):
    """Whiten advantages over policy tokens, without trajectories that are alone in their group."""
    compared = [sum(g == row[0] for g, _, _ in rows) > 1 for row in rows]
    tokens = [
        a
        for a, row, there in zip(advantages, rows, compared, strict=True)
        for _ in range(length(row) if there else 0)
    ]
    mean = statistics.fmean(tokens) if tokens else 0.0
    var = statistics.variance(tokens) if len(tokens) > 1 else 0.0
    return [
        (a - mean) / np.sqrt(var + 1e-8) if there and length(row) else 0.0
        for a, row, there in zip(advantages, rows, compared, strict=True)
    ]


def estimate(name, rows):
    """Return the result for all sequences; each sequence is a sample with its trajectory's reward."""
    sequences = [(i, row, mask) for i, row in enumerate(rows) for mask in row[2]]
    batch = Batch(
        {
            "scores": np.array([row[1] for _, row, _ in sequences], np.float32),
            "response_mask": Ragged.from_list([m for _, _, m in sequences], dtype=bool),
        }
    )
    groups = Groups.of(
        np.array([row[0] * 7 + 3 for _, row, _ in sequences]),
        np.array([i * 5 for i, _, _ in sequences]),
    )
    return ESTIMATORS[name].estimate(batch, groups)


def plain(pairs):
    """Return trajectories of one sequence with two tokens each."""
    return [(group, reward, [[True, True]]) for group, reward in pairs]


@by_name
@settings(max_examples=30)
@given(rows=trajectories)
def test_advantages_equal_the_papers_formula(name, rows):
    rows = [(group, float(np.float32(reward)), parts) for group, reward, parts in rows]
    result = estimate(name, rows)
    expected = [
        # A sample without policy tokens is not whitened.
        a if any(mask) or name != "reinforce_plus_plus_baseline" else 0.0
        for a, row in zip(oracle(name, rows), rows, strict=True)
        for mask in row[2]
    ]
    assert result.advantages.dtype == np.float32
    largest = max(abs(reward) for _, reward, _ in rows)
    dimensionless = name in {"grpo", "grpo_passk_std", "reinforce_plus_plus_baseline"}
    np.testing.assert_allclose(
        result.advantages,
        expected,
        rtol=1e-4,
        atol=1e-4 if dimensionless else 1e-5 + 1e-9 * largest,
    )


@by_name
@settings(max_examples=30)
@given(rows=trajectories)
def test_groups_of_one_and_groups_without_signal_are_counted(name, rows):
    groups = [row[0] for row in rows for _ in row[2]]
    result = estimate(name, rows)
    trajectories_of = [row[0] for row in rows]
    alone = sum(trajectories_of.count(group) == 1 for group in set(groups))
    assert result.metrics["advantage/singleton_groups"] == alone
    got = np.asarray(result.advantages)
    silent = [not got[np.array(groups) == group].any() for group in set(groups)]
    assert result.metrics["advantage/zero_signal_groups"] == pytest.approx(np.mean(silent))


@by_name
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -1e6])
def test_equal_rewards_are_exactly_no_signal(name, reward):
    result = estimate(name, plain([(0, reward)] * 8))
    assert np.all(result.advantages == 0)
    assert result.metrics["advantage/zero_signal_groups"] == 1.0


@singletons_are_0
def test_a_group_of_one_is_0_whatever_the_other_groups_are(name):
    result = estimate(name, plain([(0, 5.0), (1, 0.0), (1, 1.0), (1, 1.0), (2, -7.0)]))
    assert result.advantages[0] == 0
    assert result.advantages[4] == 0
    assert result.metrics["advantage/singleton_groups"] == 2


def test_a_group_of_one_can_keep_its_raw_reward():
    result = estimate("grpo_raw", plain([(0, 5.0), (1, 0.0), (1, 1.0)]))
    assert result.advantages[0] == 5
    assert result.metrics["advantage/singleton_groups"] == 1


@by_name
def test_trajectories_of_two_groups_may_share_an_id(name):
    batch = Batch(
        {
            "scores": np.array([1.0, 0.0, 1.0, 0.0], np.float32),
            "response_mask": Ragged.from_list([[True]] * 4, dtype=bool),
        }
    )
    group_id = np.array([0, 0, 1, 1])
    shared = ESTIMATORS[name].estimate(batch, Groups.of(group_id, np.array([0, 1, 0, 1])))
    apart = ESTIMATORS[name].estimate(batch, Groups.of(group_id))
    np.testing.assert_array_equal(shared.advantages, apart.advantages)


@by_name
@settings(max_examples=30)
@given(rows=trajectories, scale=st.sampled_from([0.25, 8.0]), shift=st.sampled_from([-4.0, 16.0]))
def test_a_shift_of_all_rewards_changes_nothing_and_a_scale_only_the_scale(
    name, rows, scale, shift
):
    rows = [(group, round(reward) % 16, parts) for group, reward, parts in rows]
    moved = [(group, scale * reward + shift, parts) for group, reward, parts in rows]
    before, after = estimate(name, rows).advantages, estimate(name, moved).advantages
    if name == "grpo_raw":
        compared = np.repeat(
            [sum(g == row[0] for g, _, _ in rows) > 1 for row in rows],
            [len(row[2]) for row in rows],
        )
        before, after = before[compared], after[compared]
    normalised = name in {"grpo", "grpo_raw", "grpo_passk_std", "reinforce_plus_plus_baseline"}
    np.testing.assert_allclose(
        after, before if normalised else scale * before, rtol=1e-4, atol=1e-5
    )


@by_name
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rewards_that_are_not_finite_stay_visible(name):
    result = estimate(name, plain([(0, float("nan")), (0, 1.0), (1, 0.0), (1, 1.0)]))
    assert not np.isfinite(result.advantages[0])


@by_name
def test_the_fewest_samples_that_make_sense(name):
    estimator = ESTIMATORS[name]
    least = 1 if name == "grpo_raw" else 2
    assert type(estimator).min_group_size(estimator.config) == least


@by_name
def test_missing_columns_name_who_needs_them(name):
    estimator = ESTIMATORS[name]
    with pytest.raises(ColumnError, match=rf"{estimator.name}(.|\n)*scores"):
        estimator.estimate(Batch({"sample_index": np.zeros(1, np.int64)}), Groups.of(np.zeros(1)))


def test_a_long_response_draws_the_opo_baseline_to_its_reward():
    rows = [(0, 1.0, [[True] * 9]), (0, 0.0, [[True]])]
    np.testing.assert_allclose(estimate("opo", rows).advantages, [0.1, -0.9], rtol=1e-6)


def test_tool_tokens_have_no_weight_in_the_opo_baseline():
    rows = [(0, 1.0, [[True] + [False] * 8]), (0, 0.0, [[True]])]
    np.testing.assert_allclose(estimate("opo", rows).advantages, [0.5, -0.5], rtol=1e-6)


def test_negative_rewards_count_as_signal_for_gpg():
    result = estimate("gpg", plain([(0, 1.0), (0, -1.0), (1, -1.0), (1, -1.0)]))
    np.testing.assert_allclose(result.advantages, [2.0, -2.0, 0.0, 0.0])


def test_two_best_samples_have_no_lead():
    result = estimate("grpo_passk", plain([(0, 1.0), (0, 1.0), (0, 0.0)]))
    assert np.all(result.advantages == 0)


def test_the_best_sample_alone_has_the_lead_over_the_second():
    result = estimate("grpo_passk", plain([(0, 0.25), (0, 1.0), (0, 0.0)]))
    assert result.advantages.tolist() == [0, 0.75, 0]


@given(st.lists(rewards, min_size=1, max_size=9))
def test_without_a_baseline_the_advantage_is_the_reward(given_rewards):
    columns = Batch({"scores": np.array(given_rewards, np.float32)})
    groups = Groups.of(np.arange(len(given_rewards)) // 2)
    found = made(ScoreEstimator).estimate(columns, groups).advantages
    np.testing.assert_array_equal(found, np.array(given_rewards, np.float32))
