"""Sample filters against plain loops written from their definitions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.batch import Batch
from dovetail.errors import ColumnError
from dovetail.interfaces import Groups, PluginContext
from dovetail.sections import PluginSection
from dovetail_algorithms.config.filters import EqualRewardsConfig, ScoreRangeConfig
from dovetail_algorithms.filters.equal_rewards import EqualRewards
from dovetail_algorithms.filters.overlong import Overlong
from dovetail_algorithms.filters.score_range import ScoreRange
from dovetail_sdk.testing.conformance import SampleFilterConformance


class TestEqualRewards(SampleFilterConformance):
    plugin = EqualRewards


class TestEqualComponents(SampleFilterConformance):
    plugin = EqualRewards
    config = EqualRewardsConfig(name="equal_rewards", component="accuracy", tolerance=0.1)


class TestOverlong(SampleFilterConformance):
    plugin = Overlong


class TestScoreRange(SampleFilterConformance):
    plugin = ScoreRange
    config = ScoreRangeConfig(name="score_range", lower=0.2, upper=0.8)


class TestScoreRangeOfSamples(SampleFilterConformance):
    plugin = ScoreRange
    config = ScoreRangeConfig(name="score_range", lower=0.5, unit="sample", component="format")


def keep(plugin, config, columns):
    batch = Batch(columns)
    groups = Groups.of(batch["group_id"], batch["trajectory_id"])
    return plugin(config, PluginContext()).keep(batch, groups)


def equal_rewards(columns, **keys):
    return keep(EqualRewards, EqualRewardsConfig(name="equal_rewards", **keys), columns)


def score_range(columns, **keys):
    return keep(ScoreRange, ScoreRangeConfig(name="score_range", **keys), columns)


def overlong(columns):
    return keep(Overlong, PluginSection(name="overlong"), columns)


@st.composite
def scored(draw):
    """Samples in any order: groups of any size, trajectories of up to three samples with one reward each."""
    rows = []
    trajectory = 0
    for group in range(draw(st.integers(1, 5))):
        for _ in range(draw(st.integers(1, 5))):
            reward = draw(st.sampled_from([-1.0, 0.0, 0.1, 0.2, 0.25, 1.0, 1e6]))
            for _ in range(draw(st.integers(1, 3))):
                reason = draw(st.sampled_from(["stop", "length", "abort"]))
                rows.append((10 + group, trajectory, reward, reason))
            trajectory += 1
    rows = draw(st.permutations(rows))
    group_ids, trajectories, rewards, reasons = zip(*rows, strict=True)
    return {
        "group_id": np.array(group_ids),
        "trajectory_id": np.array(trajectories),
        "scores": np.array(rewards, np.float32),
        "reward_components": [{"accuracy": reward, "other": 0.5} for reward in rewards],
        "finish_reason": list(reasons),
    }


def rows_of(columns):
    """Return the samples as objects, for the oracles."""
    names = {
        "group_id": "group",
        "trajectory_id": "trajectory",
        "scores": "reward",
        "finish_reason": "reason",
    }
    columns_of = [columns[name] for name in names]
    return [
        SimpleNamespace(**dict(zip(names.values(), row, strict=True)))
        for row in zip(*columns_of, strict=True)
    ]


@given(scored(), st.sampled_from([0.0, 0.1, 0.5]))
def test_equal_rewards_leaves_out_the_groups_in_which_no_two_rewards_differ(columns, tolerance):
    rows = rows_of(columns)
    expected = []
    for row in rows:
        rewards = [float(other.reward) for other in rows if other.group == row.group]
        expected.append(max(abs(a - b) for a in rewards for b in rewards) > tolerance)
    assert equal_rewards(columns, tolerance=tolerance).tolist() == expected


@given(scored())
def test_a_component_is_compared_in_place_of_the_reward(columns):
    constant = {**columns, "scores": np.zeros(len(columns["scores"]), np.float32)}
    np.testing.assert_array_equal(
        equal_rewards(constant, component="accuracy"), equal_rewards(columns)
    )
    assert not equal_rewards(columns, component="other").any()


@given(scored(), st.sampled_from([None, 0.0, 0.2]), st.sampled_from([None, 0.25, 0.8]))
def test_score_range_judges_groups_by_the_mean_over_their_trajectories(columns, lower, upper):
    rows = rows_of(columns)
    expected = []
    for row in rows:
        by_trajectory = {o.trajectory: float(o.reward) for o in rows if o.group == row.group}
        mean = sum(by_trajectory.values()) / len(by_trajectory)
        expected.append(
            (lower is None or mean >= lower - 1e-6) and (upper is None or mean <= upper + 1e-6)
        )
    assert score_range(columns, lower=lower, upper=upper).tolist() == expected


@given(scored())
def test_score_range_of_samples_judges_each_by_itself(columns):
    kept = score_range(columns, lower=0.1, upper=0.25, unit="sample")
    assert kept.tolist() == [0.1 - 1e-6 <= row.reward <= 0.25 + 1e-6 for row in rows_of(columns)]


@given(scored())
def test_overlong_masks_trajectories_that_were_cut_off(columns):
    rows = rows_of(columns)
    cut = {row.trajectory for row in rows if row.reason == "length"}
    assert overlong(columns).tolist() == [row.trajectory not in cut for row in rows]


def samples(scores, components=None):
    return {
        "sample_id": [f"s{row}" for row in range(len(scores))],
        "group_id": np.zeros(len(scores), np.int64),
        "trajectory_id": np.arange(len(scores)),
        "scores": np.array(scores, np.float32),
    } | ({} if components is None else {"reward_components": components})


def test_a_bound_that_a_float32_mean_equals_is_kept():
    fifths = samples([1, 0, 0, 0, 0])
    assert score_range(fifths, lower=0.2).all()
    assert score_range(samples([0.2, 0.2]), upper=0.2).all()


def test_a_group_of_one_has_equal_rewards():
    assert not equal_rewards(samples([0.5])).any()


@pytest.mark.filterwarnings("error")
def test_rewards_that_are_no_numbers_are_left_for_the_flow_to_report():
    assert equal_rewards(samples([np.nan, np.nan])).all()
    assert equal_rewards(samples([np.inf, np.inf])).all()
    assert score_range(samples([np.nan, 1.0]), lower=0.0, upper=0.5).all()
    assert score_range(samples([np.inf, 1.0]), lower=0.0, upper=0.5).all()


@pytest.mark.parametrize("judge", [equal_rewards, score_range])
def test_a_sample_without_the_component_is_an_error_that_names_it(judge):
    parts = [{"accuracy": 1.0}, {"acuracy": 0.0}, None, {"accuracy": "yes"}]
    with pytest.raises(ColumnError) as caught:
        judge(samples([0, 1, 0, 1], parts), component="accuracy")
    text = str(caught.value)
    assert "'accuracy' as a number, but 3 of 4 samples" in text
    assert "has the components: acuracy" in text
    assert "did you mean 'acuracy'?" in text


def test_a_batch_without_components_is_an_error():
    with pytest.raises(
        ColumnError, match="sample filter 'equal_rewards' needs 'reward_components'"
    ):
        equal_rewards(samples([0, 1]), component="accuracy")


def test_bounds_that_keep_nothing_are_refused():
    with pytest.raises(ValueError, match=r"lower=0\.8 is above upper=0\.2"):
        ScoreRangeConfig(name="score_range", lower=0.8, upper=0.2)


def test_the_column_that_is_judged_is_the_one_required():
    for plugin, config in ((EqualRewards, EqualRewardsConfig), (ScoreRange, ScoreRangeConfig)):
        assert plugin.requires(config(name="x")) == {"scores"}
        assert plugin.requires(config(name="x", component="a")) == {"reward_components"}
