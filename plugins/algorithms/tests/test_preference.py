"""Objectives of preference pairs: values by hand, extremes, micro-batches, and columns read. The conformance suites have the oracles."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces import PluginContext, PluginRef
from dovetail.metrics import values
from dovetail.plugins import make_plugin
from dovetail_algorithms.config.objectives import DpoConfig, IpoConfig, OrpoConfig, SimpoConfig
from dovetail_algorithms.conformance import preferences as suites
from dovetail_algorithms.objectives.preference import Dpo, Ipo, Orpo, Simpo
from dovetail_sdk.testing import update_of

SUITES = [
    suites.TestDpo,
    suites.TestRobustDpo,
    suites.TestIpo,
    suites.TestSimpo,
    suites.TestOrpo,
]


def pairs(*log_probs, ref=0.0):
    """Return a batch of pairs from the token log-probabilities of each response, chosen first."""
    current = Ragged.from_list([list(row) for row in log_probs], np.float32)
    return Batch(
        {
            "response_mask": current.with_values(np.ones(len(current.values), np.bool_)),
            "pair_id": np.arange(len(log_probs)) // 2,
            "chosen": np.arange(len(log_probs)) % 2 == 0,
            "current": current,
            "ref_log_probs": current.with_values(np.full_like(current.values, ref)),
        }
    )


def run(objective, config, batch, **how):
    """Return the loss, its gradient by the log-probabilities [T], and metrics without their prefix."""
    goal = objective(config, PluginContext())
    found = update_of(goal, batch, {"log_probs": batch["current"].values}, **how)
    assert found.finite
    metrics = {name.partition("/")[2]: v for name, v in values(found.metrics).items()}
    assert metrics["loss"] == pytest.approx(found.loss, rel=1e-6)
    return found.loss, found.gradients["log_probs"], metrics


def sigma(x):
    return 1 / (1 + math.exp(-x))


def test_dpo_by_hand():
    batch = pairs([-1.0, -1.0], [-3.0], ref=-1.5)  # ratios 1 and -1.5
    loss, gradient, metrics = run(Dpo, DpoConfig(name="dpo", beta=0.4), batch)
    assert loss == pytest.approx(-math.log(sigma(1.0)), rel=1e-6)
    slope = 0.4 * sigma(-1.0)
    assert gradient == pytest.approx([-slope, -slope, slope], rel=1e-6)
    assert metrics == pytest.approx(
        {
            "loss": loss,
            "accuracy": 1.0,
            "margin": 1.0,
            "chosen_reward": 0.4,
            "rejected_reward": -0.6,
            "chosen_log_prob": -2.0,
            "rejected_log_prob": -3.0,
        },
        rel=1e-6,
    )


def test_tokens_beyond_the_shorter_response_weigh_less():
    # Log-ratios by token: chosen 1, 1; rejected 1, 1, 3, 3, of which the last two are beyond the chosen response's length.
    batch = pairs([-1.0, -1.0], [-1.0, -1.0, 1.0, 1.0], ref=-2.0)
    loss, gradient, metrics = run(Dpo, DpoConfig(name="dpo", beta=1.0, ld_alpha=0.25), batch)
    margin = 2.0 - (2.0 + 0.25 * 6.0)
    assert loss == pytest.approx(-math.log(sigma(margin)), rel=1e-6)
    slope = sigma(-margin)
    expected = [-slope, -slope, slope, slope, 0.25 * slope, 0.25 * slope]
    assert gradient == pytest.approx(expected, rel=1e-6)
    assert metrics["rejected_log_prob"] == 0.0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"loss": "exo"}, "'exo' needs label_smoothing"),
        ({"loss": "hinge", "label_smoothing": 0.1}, "'hinge' does not support label_smoothing"),
        ({"loss": "nca", "robust": True}, "robust=true"),
        ({"loss": "bco", "f_divergence": "js"}, "not defined for f_divergence=js"),
    ],
)
def test_settings_that_a_loss_does_not_read_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        DpoConfig(name="dpo", **settings)


def test_a_policy_that_is_its_reference_is_half_right_and_has_the_loss_log_2():
    batch = pairs([-1.0, -2.0], [-0.5])
    batch = batch.with_columns({"ref_log_probs": batch["current"]})
    loss, gradient, metrics = run(Dpo, DpoConfig(name="dpo"), batch)
    assert loss == pytest.approx(math.log(2), rel=1e-6)
    assert metrics["accuracy"] == 0.5
    assert gradient == pytest.approx([-0.05, -0.05, 0.05], rel=1e-6)


def test_ipo_stops_at_its_target():
    """The target is a margin of 1/(2β) = 2 between the mean log-ratios."""
    batch = pairs([-1.0, -1.0], [-3.0])
    loss, gradient, metrics = run(Ipo, IpoConfig(name="ipo", beta=0.25), batch)
    assert loss == 0.0
    assert metrics["margin"] == 2.0
    assert not gradient.any()


def test_simpo_compares_means_whatever_the_lengths():
    short, long = pairs([-1.0], [-2.0]), pairs([-1.0] * 5, [-2.0] * 3)
    config = SimpoConfig(name="simpo", beta=2.0, gamma=0.5)
    (loss, *_), (same, *_) = (run(Simpo, config, batch) for batch in (short, long))
    assert loss == pytest.approx(-math.log(sigma(2.0 - 0.5)), rel=1e-6)
    assert same == pytest.approx(loss, rel=1e-6)


def test_orpo_by_hand():
    batch = pairs([math.log(0.5)], [math.log(0.2)])  # odds 1 and 1/4
    loss, _, metrics = run(Orpo, OrpoConfig(name="orpo", beta=0.3), batch)
    assert loss == pytest.approx(-0.3 * math.log(0.8) - math.log(0.5), rel=1e-5)
    assert metrics["margin"] == pytest.approx(math.log(4), rel=1e-5)


def test_orpo_of_a_response_that_is_certain_stays_finite():
    for batch in (pairs([0.0], [-1.0]), pairs([-1.0], [0.0])):
        loss, gradient, _ = run(Orpo, OrpoConfig(name="orpo"), batch)
        assert math.isfinite(loss)
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.__name__)
def test_far_log_probabilities_overflow_nothing(suite):
    batch = pairs([-2e4] * 3, [-1e-3], [-1e-3], [-2e4])
    _, gradient, _ = run(suite.plugin, suite.config, batch)
    assert np.isfinite(gradient).all()


@settings(max_examples=6)
@given(data=st.data())
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.__name__)
def test_loss_and_gradient_are_the_oracles_however_pairs_are_ordered_and_cut(suite, data):
    count = data.draw(st.integers(1, 4))
    row = st.lists(st.floats(-8, -0.125, width=32), min_size=1, max_size=4)
    batch = pairs(*data.draw(st.lists(row, min_size=2 * count, max_size=2 * count)))
    tokens = len(batch["current"].values)
    ref = data.draw(st.lists(st.floats(-8, 0, width=32), min_size=tokens, max_size=tokens))
    batch = batch.with_columns(
        {"ref_log_probs": batch["current"].with_values(np.array(ref, np.float32))}
    )
    if not suite.plugin.reference:
        batch = batch.drop({"ref_log_probs"})
    batch = batch.take(np.array(data.draw(st.permutations(range(2 * count)))))
    expected, gradients = suite().oracle(batch, {"log_probs": batch["current"].values})
    part_P = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    part_N = np.array(part_P)[batch["pair_id"]]
    for parts in (None, [np.flatnonzero(part_N == part).tolist() for part in range(3)]):
        loss, gradient, _ = run(suite.plugin, suite.config, batch, parts=parts)
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-5)
        np.testing.assert_allclose(gradient, gradients["log_probs"], atol=1e-5)


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
def test_half_a_pair_is_refused(name):
    goal = make_plugin(PluginRef(kind="objective", name=name), PluginContext())
    batch = pairs([-1.0], [-2.0], [-1.0]).take(np.array([0, 1, 2]))
    with pytest.raises(ColumnError, match="pair_id 1 has 1 chosen and 0 rejected"):
        update_of(goal, batch, {"log_probs": batch["current"].values})


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [(DpoConfig, "beta", 0.0), (DpoConfig, "label_smoothing", 0.5), (SimpoConfig, "gamma", -1.0)],
)
def test_a_setting_outside_its_range_is_refused(config, key, value):
    with pytest.raises(ValueError, match=key):
        config(name="any", **{key: value})
