"""PPO's clipped loss and REINFORCE: values against the papers' formulas, gradients against finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.interfaces import LossInputs, PluginContext
from dovetail.numerics import resolve_metrics
from dovetail.telemetry.metrics import values
from dovetail_algorithms.config.losses import PpoClipConfig, ReinforceConfig
from dovetail_algorithms.losses.ppo_clip import PpoClip
from dovetail_algorithms.losses.reinforce import Reinforce

CONFIGS = [
    PpoClipConfig(),
    PpoClipConfig(clip_low=0.2, clip_high=0.28),
    PpoClipConfig(dual_clip=None),
    PpoClipConfig(clip_low=0.1, clip_high=0.5, dual_clip=1.5),
]

tokens = st.lists(
    st.tuples(st.floats(-3, 3), st.floats(-8, 0), st.floats(-8, 0), st.booleans()),
    min_size=1,
    max_size=12,
)


def inputs(log_probs, old, advantages, mask=None, dtype=torch.float64):
    tensor = lambda x: torch.as_tensor(x, dtype=dtype)  # noqa: E731
    count = len(advantages)
    return LossInputs(
        log_probs_T=log_probs if isinstance(log_probs, torch.Tensor) else tensor(log_probs),
        mask_T=torch.ones(count, dtype=torch.bool) if mask is None else torch.tensor(mask),
        offsets_N1=torch.tensor([0, count]),
        columns={"old_log_probs": tensor(old), "advantages": tensor(advantages)},
    )


def ppo(config):
    return PpoClip(config, PluginContext())


def oracle(config, advantage, log_prob, old):
    ratio = math.exp(min(max(log_prob - old, -20), 20))
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    loss = max(-advantage * ratio, -advantage * clipped)
    if advantage < 0 and config.dual_clip is not None:
        loss = min(loss, -advantage * config.dual_clip)
    return loss, ratio


@pytest.mark.parametrize("config", CONFIGS)
@given(rows=tokens)
def test_ppo_equals_its_formula(config, rows):
    advantages, log_probs, old, mask = zip(*rows, strict=True)
    result = ppo(config).token_losses(inputs(log_probs, old, advantages, mask))
    expected = [oracle(config, *row) for row in zip(advantages, log_probs, old, strict=True)]
    np.testing.assert_allclose(result.losses_T.numpy(), [loss for loss, _ in expected], rtol=1e-9)
    metrics = values(resolve_metrics([result.metrics]))
    ratios = [ratio for (_, ratio), kept in zip(expected, mask, strict=True) if kept]
    if ratios:
        assert metrics["actor/ratio_mean"] == pytest.approx(np.mean(ratios), rel=1e-5)
        assert metrics["actor/ratio_max"] == pytest.approx(max(ratios), rel=1e-5)
        approx = np.mean([r - 1 - math.log(r) for r in ratios])
        assert metrics["actor/approx_kl"] == pytest.approx(approx, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("config", CONFIGS)
def test_ppo_gradients_agree_with_finite_differences(config):
    rng = np.random.default_rng(0)
    old = rng.uniform(-4, -1, 40)
    # Away from the kinks, where there is no gradient to compare.
    log_ratios = np.log(rng.choice([0.3, 0.85, 0.95, 1.05, 1.12, 1.9, 4.0], 40))
    log_probs = torch.tensor(old + log_ratios, requires_grad=True)
    advantages = rng.normal(size=40)
    loss = lambda x: ppo(config).token_losses(inputs(x, old, advantages)).losses_T  # noqa: E731
    assert torch.autograd.gradcheck(loss, (log_probs,))


def test_clipped_tokens_have_no_gradient_and_are_counted_by_side():
    config = PpoClipConfig(clip_low=0.2, clip_high=0.28)
    ratios = np.array([1.5, 1.25, 0.5, 0.9, 1.5, 0.5, 4.0])
    advantages = np.array([1.0, 1.0, -1.0, -1.0, -1.0, 1.0, -1.0])
    log_probs = torch.tensor(np.log(ratios), requires_grad=True)
    result = ppo(config).token_losses(inputs(log_probs, np.zeros(7), advantages))
    result.losses_T.sum().backward()
    assert (log_probs.grad == 0).tolist() == [True, False, True, False, False, False, True]
    metrics = values(resolve_metrics([result.metrics]))
    assert metrics["actor/clip_frac"] == pytest.approx(2 / 7)
    assert metrics["actor/clip_frac_upper"] == pytest.approx(1 / 7)
    assert metrics["actor/clip_frac_lower"] == pytest.approx(1 / 7)
    assert metrics["actor/dual_clip_frac"] == pytest.approx(1 / 7)


def test_on_policy_the_gradient_is_the_policy_gradient():
    advantages = np.array([0.5, -2.0, 0.0])
    old = np.array([-1.0, -2.0, -3.0])
    for plugin in (ppo(PpoClipConfig()), Reinforce(ReinforceConfig(), PluginContext())):
        log_probs = torch.tensor(old, requires_grad=True)
        plugin.token_losses(inputs(log_probs, old, advantages)).losses_T.sum().backward()
        np.testing.assert_allclose(log_probs.grad.numpy(), -advantages)


@pytest.mark.parametrize("difference", [-1e4, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_extreme_ratios_stay_finite(difference, advantage):
    log_probs = torch.tensor([difference], dtype=torch.float32, requires_grad=True)
    result = ppo(PpoClipConfig()).token_losses(
        inputs(log_probs, [0.0], [advantage], dtype=torch.float32)
    )
    result.losses_T.sum().backward()
    assert torch.isfinite(result.losses_T).all()
    assert torch.isfinite(log_probs.grad).all()
    assert np.isfinite(list(values(resolve_metrics([result.metrics])).values())).all()


def test_reinforce_is_minus_advantage_times_log_prob():
    result = Reinforce(ReinforceConfig(), PluginContext()).token_losses(
        inputs([-1.0, -2.0], [0.0, 0.0], [3.0, -1.0])
    )
    assert result.losses_T.tolist() == [3.0, -2.0]
    assert not result.metrics


@pytest.mark.parametrize("wrong", [{"dual_clip": 1.0}, {"clip_low": 1.5}, {"clip_high": -0.1}])
def test_bounds_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PpoClipConfig(**wrong)


def test_losses_and_estimators_declare_what_they_read():
    assert PpoClip.requires(PpoClipConfig()) == {"advantages", "old_log_probs"}
    assert Reinforce.requires(ReinforceConfig()) == {"advantages"}
