"""GRPO, Dr. GRPO and RLOO, against loops written from the papers."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.batch import Batch
from dovetail.errors import ColumnError
from dovetail.interfaces import Groups, PluginContext
from dovetail_algorithms.config.estimators import DrGrpoConfig, GrpoConfig, RlooConfig
from dovetail_algorithms.estimators.dr_grpo import DrGrpo
from dovetail_algorithms.estimators.grpo import Grpo
from dovetail_algorithms.estimators.rloo import Rloo

ESTIMATORS = [
    Grpo(GrpoConfig(), PluginContext()),
    Grpo(GrpoConfig(norm_by_std=False), PluginContext()),
    Grpo(GrpoConfig(singleton="raw"), PluginContext()),
    DrGrpo(DrGrpoConfig(), PluginContext()),
    Rloo(RlooConfig(), PluginContext()),
]
NAMES = ["grpo", "grpo_no_std", "grpo_raw", "dr_grpo", "rloo"]

samples = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.one_of(st.sampled_from([0.0, 0.1, 1.0]), st.floats(-100, 100, width=32)),
    ),
    min_size=1,
    max_size=24,
)


def oracle(name, rows):
    """Each sample's advantage, one at a time."""
    advantages = []
    for i, (group, reward) in enumerate(rows):
        members = [r for g, r in rows if g == group]
        others = [r for j, (g, r) in enumerate(rows) if g == group and j != i]
        if not others:
            advantages.append(reward if name == "grpo_raw" else 0.0)
        elif name == "rloo":
            advantages.append(reward - statistics.fmean(others))
        else:
            centred = reward - statistics.fmean(members)
            scaled = name in {"grpo", "grpo_raw"}
            advantages.append(centred / (statistics.stdev(members) + 1e-6) if scaled else centred)
    return advantages


def estimate(estimator, rows):
    ids_N = np.array([group for group, _ in rows]) * 7 + 3
    scores_N = np.array([reward for _, reward in rows], np.float32)
    return estimator.estimate(Batch({"scores": scores_N}), Groups.of(ids_N))


@pytest.mark.parametrize(
    ("name", "estimator"), list(zip(NAMES, ESTIMATORS, strict=True)), ids=NAMES
)
@given(rows=samples)
def test_advantages_equal_the_papers_formula(name, estimator, rows):
    rows = [(group, float(np.float32(reward))) for group, reward in rows]
    result = estimate(estimator, rows)
    assert result.advantages.dtype == np.float32
    np.testing.assert_allclose(result.advantages, oracle(name, rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=NAMES)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -1e6])
def test_equal_rewards_are_exactly_no_signal(estimator, reward):
    result = estimate(estimator, [(0, reward)] * 8)
    assert np.all(result.advantages == 0)
    assert result.metrics["advantage/zero_signal_groups"] == 1.0


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=NAMES)
def test_groups_of_one_are_counted(estimator):
    result = estimate(estimator, [(0, 1.0), (1, 0.0), (1, 1.0), (2, 5.0)])
    assert result.metrics["advantage/singleton_groups"] == 2
    silent = 0 if estimator.config == GrpoConfig(singleton="raw") else 2 / 3
    assert result.metrics["advantage/zero_signal_groups"] == pytest.approx(silent)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=NAMES)
def test_the_fewest_samples_that_make_sense(estimator):
    least = 1 if estimator.config == GrpoConfig(singleton="raw") else 2
    assert type(estimator).min_group_size(estimator.config) == least


def test_the_order_of_the_samples_makes_no_difference():
    rng = np.random.default_rng(0)
    rows = [
        (int(g), float(r)) for g, r in zip(rng.integers(0, 5, 30), rng.normal(size=30), strict=True)
    ]
    order = rng.permutation(30)
    plain = estimate(ESTIMATORS[0], rows).advantages
    shuffled = estimate(ESTIMATORS[0], [rows[i] for i in order]).advantages
    np.testing.assert_allclose(plain[order], shuffled, rtol=1e-5, atol=1e-6)


def test_missing_scores_name_who_needs_them():
    with pytest.raises(ColumnError, match=r"grpo(.|\n)*scores"):
        ESTIMATORS[0].estimate(
            Batch({"sample_index": np.zeros(1, np.int64)}), Groups.of(np.zeros(1))
        )
