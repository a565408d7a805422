"""KL estimators: formulas, gradients, bounds; and the controllers of their weight."""

import math

import pytest
import torch
from hypothesis import assume, given, strategies as st

from dovetail.errors import ConfigError, NumericsError
from dovetail.interfaces import PluginContext
from dovetail.sections import PluginSection
from dovetail_stages import estimate_kl
from dovetail_stages.config import AdaptiveKlConfig
from dovetail_stages.numerics.kl import ESTIMATORS
from dovetail_stages.numerics.kl_controller import AdaptiveKl, FixedKl

FORMULAS = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: min(max(math.exp(-min(max(d, -20), 20)) + min(max(d, -20), 20) - 1, -10), 10),
}


def value_and_gradient(name, difference):
    log_prob = torch.tensor([difference], dtype=torch.float64, requires_grad=True)
    kl = estimate_kl(name, log_prob, torch.zeros(1, dtype=torch.float64))
    kl.sum().backward()
    return kl.item(), log_prob.grad.item()


@given(st.floats(-60, 60))
def test_values_equal_their_formulas(difference):
    for name, formula in FORMULAS.items():
        value, _ = value_and_gradient(name, difference)
        assert math.isclose(value, formula(difference), rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.parametrize("name", ["k1+", "k3+"])
@given(st.floats(-60, 60))
def test_straight_through_has_the_value_of_one_and_the_gradient_of_k2(name, difference):
    value, gradient = value_and_gradient(name, difference)
    assert math.isclose(value, FORMULAS[name[:2]](difference), rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(gradient, difference, rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.parametrize("name", sorted(FORMULAS))
@given(st.floats(-4, 4))
def test_gradients_agree_with_finite_differences_of_the_formula(name, difference):
    kink, bound = name == "abs" and abs(difference) < 1e-3, name == "k3" and difference < -2.2
    assume(not kink and not bound)
    step = 1e-6
    slope = (FORMULAS[name](difference + step) - FORMULAS[name](difference - step)) / (2 * step)
    _, gradient = value_and_gradient(name, difference)
    assert math.isclose(gradient, slope, rel_tol=1e-6, abs_tol=1e-8)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(st.lists(st.floats(-30, 30), max_size=8), st.integers(0, 8))
def test_no_token_sees_another(name, differences, cut):
    whole_T = torch.tensor(differences, dtype=torch.float64)
    cut_T = [ESTIMATORS[name](part_T) for part_T in (whole_T[:cut], whole_T[cut:])]
    assert torch.equal(torch.cat(cut_T), ESTIMATORS[name](whole_T))


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - {"k1", "k1+"}))
@given(st.floats(-1e3, 1e3))
def test_only_k1_may_be_negative(name, difference):
    assert value_and_gradient(name, difference)[0] >= 0


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_equal_policies_have_no_divergence(name):
    assert value_and_gradient(name, 0.0)[0] == 0


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("difference", [-1e4, 1e4])
def test_extreme_ratios_stay_finite(name, difference):
    value, gradient = value_and_gradient(name, difference)
    assert math.isfinite(value)
    assert math.isfinite(gradient)


def test_an_unknown_estimator_names_the_nearest():
    with pytest.raises(ConfigError, match=r"no KL estimator 'k33'(.|\n)*did you mean 'k3"):
        estimate_kl("k33", torch.zeros(1), torch.zeros(1))


def adaptive(target=0.1, horizon=100):
    return AdaptiveKl(AdaptiveKlConfig(target=target, horizon=horizon), PluginContext())


def test_the_fixed_controller_never_moves():
    controller = FixedKl(PluginSection(), PluginContext())
    controller.update(5.0, 100)
    assert controller.value == 1.0


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.1, 1.0), (0.11, 1 + 0.1 * 0.5), (9.0, 1 + 0.2 * 0.5), (0.0, 1 - 0.2 * 0.5)],
)
def test_the_adaptive_controller_follows_its_equation(kl, factor):
    controller = adaptive()
    controller.update(kl, 50)
    assert math.isclose(controller.value, factor)


def test_a_step_larger_than_the_horizon_never_turns_the_weight_negative():
    controller = adaptive(horizon=1)
    controller.update(0.0, 1000)
    assert math.isclose(controller.value, 0.8)


def test_a_kl_that_is_not_finite_is_refused():
    with pytest.raises(NumericsError, match="nan"):
        adaptive().update(math.nan, 8)
