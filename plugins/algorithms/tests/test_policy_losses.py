"""Properties of the policy losses besides their formulas: where gradients stop, the columns read, and the settings refused."""

import math

import numpy as np
import pytest
import torch

from dovetail.interfaces import LossInputs, PluginContext
from dovetail.metrics import values
from dovetail_algorithms.config import losses as config
from dovetail_algorithms.losses.cispo import CispoLoss
from dovetail_algorithms.losses.clip_cov import ClipCovLoss
from dovetail_algorithms.losses.dppo import DppoLoss
from dovetail_algorithms.losses.dro import DroLoss
from dovetail_algorithms.losses.gmpo import GmpoLoss
from dovetail_algorithms.losses.gpg import GpgLoss
from dovetail_algorithms.losses.gspo import GspoLoss
from dovetail_algorithms.losses.kl_cov import KlCovLoss
from dovetail_algorithms.losses.ppo_clip import PpoClipLoss
from dovetail_algorithms.losses.reinforce import ReinforceLoss
from dovetail_algorithms.losses.sapo import SapoLoss
from dovetail_stages import resolve_metrics

LOSSES = [
    CispoLoss,
    ClipCovLoss,
    DppoLoss,
    DroLoss,
    GmpoLoss,
    GpgLoss,
    GspoLoss,
    KlCovLoss,
    PpoClipLoss,
    ReinforceLoss,
    SapoLoss,
]


def run(plugin, log_probs, old, advantages, settings=None):
    """Return the gradient of the sum of losses, the losses, and metrics, for one sequence."""
    tensor = lambda x: torch.as_tensor(np.asarray(x), dtype=torch.float64)  # noqa: E731
    count = len(advantages)
    log_probs_T = tensor(log_probs).requires_grad_()
    inputs = LossInputs(
        log_probs_T=log_probs_T,
        mask_T=torch.ones(count, dtype=torch.bool),
        offsets_N1=torch.tensor([0, count]),
        columns={
            "old_log_probs": tensor(old),
            "rollout_log_probs": tensor(old),
            "advantages": tensor(advantages),
            "clip_cov_detached": tensor(np.zeros(count)),
            "kl_cov_penalised": tensor(np.zeros(count)),
        },
    )
    result = plugin(settings or plugin.Config(), PluginContext()).token_losses(inputs)
    result.losses_T.sum().backward()
    metrics = values(resolve_metrics([result.metrics]))
    return log_probs_T.grad.numpy(), result.losses_T.detach().numpy(), metrics


def test_clipped_tokens_have_no_gradient_and_are_counted_by_side():
    ratios = np.array([1.5, 1.25, 0.5, 0.9, 1.5, 0.5, 4.0])
    advantages = np.array([1.0, 1.0, -1.0, -1.0, -1.0, 1.0, -1.0])
    settings = config.PpoClipConfig(clip_low=0.2, clip_high=0.28)
    gradient, _, metrics = run(PpoClipLoss, np.log(ratios), np.zeros(7), advantages, settings)
    assert (gradient == 0).tolist() == [True, False, True, False, False, False, True]
    assert metrics["actor/clip_frac"] == pytest.approx(2 / 7)
    assert metrics["actor/clip_frac_upper"] == pytest.approx(1 / 7)
    assert metrics["actor/clip_frac_lower"] == pytest.approx(1 / 7)
    assert metrics["actor/dual_clip_frac"] == pytest.approx(1 / 7)


@pytest.mark.parametrize("plugin", LOSSES, ids=lambda plugin: plugin.name)
def test_on_policy_every_loss_has_the_gradient_of_the_policy_gradient(plugin):
    advantages = np.array([0.5, -2.0, 0.0])
    log_probs = np.array([-1.0, -2.0, -3.0])
    gradient, _, metrics = run(plugin, log_probs, log_probs, advantages)
    np.testing.assert_allclose(gradient, -advantages)
    if metrics:
        assert metrics["actor/approx_kl"] == metrics["actor/clip_frac"] == 0
        assert metrics["actor/ratio_mean"] == metrics["actor/ratio_max"] == 1


def test_a_ratio_above_the_clip_keeps_its_gradient_in_cispo_but_not_in_ppo():
    arguments = [np.log([0.9]), np.log([0.1]), [1.0]]
    assert run(PpoClipLoss, *arguments)[0] == 0
    gradient, _, metrics = run(CispoLoss, *arguments, config.CispoConfig(clip_high=0.5))
    np.testing.assert_allclose(gradient, -1.5)
    assert metrics["actor/clip_frac_upper"] == 1


def test_dppo_lets_a_rare_token_grow_and_holds_a_likely_one():
    gradient, _, metrics = run(DppoLoss, np.log([1e-3, 0.9]), np.log([1e-5, 0.7]), [1.0, 1.0])
    np.testing.assert_allclose(gradient, [-20.0, 0.0])
    assert metrics["actor/clip_frac_upper"] == 0.5


def test_dppo_lets_a_token_come_back():
    gradient, _, _ = run(DppoLoss, np.log([0.9, 0.1]), np.log([0.5, 0.5]), [-1.0, 1.0])
    assert (gradient != 0).all()


@pytest.mark.parametrize("plugin", [GspoLoss, GmpoLoss])
def test_sequence_ratios_weigh_each_tokens_own_advantage(plugin):
    log_ratios, advantages = np.array([0.1, 0.2, -0.15]), np.array([1.0, -2.0, 0.5])
    wide = plugin.Config(clip_low=0.5, clip_high=0.5)
    gradient, losses, _ = run(plugin, -2 + log_ratios, np.full(3, -2.0), advantages, wide)
    ratio = math.exp(log_ratios.mean())
    np.testing.assert_allclose(losses, -advantages * ratio)
    np.testing.assert_allclose(gradient, -advantages * ratio)


@pytest.mark.parametrize("plugin", [GspoLoss, GmpoLoss])
def test_sequence_losses_prescribe_the_mean_over_sequences(plugin):
    assert plugin.aggregation == "seq_mean_token_mean"


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        (lambda: config.PpoClipConfig(dual_clip=1.0), "dual_clip"),
        (lambda: config.PpoClipConfig(clip_low=1.5), "clip_low"),
        (lambda: config.PpoClipConfig(clip_high=-0.1), "clip_high"),
        (lambda: config.CispoConfig(clip_low=-0.1), "clip_low"),
        (lambda: config.SapoConfig(tau_negative=0.0), "tau_negative"),
        (lambda: config.GmpoConfig(clip_low=-0.4), "clip_low"),
        (lambda: config.ClipCovConfig(cov_low=5.0), "cov_high"),
        (lambda: config.ClipCovConfig(share=1.5), "share"),
        (lambda: config.KlCovConfig(share=-1e-4), "share"),
        (lambda: config.DppoConfig(threshold=0.0), "threshold"),
        (lambda: config.DroConfig(beta=-1.0), "beta"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, names):
    with pytest.raises(ValueError, match=names):
        wrong()


def test_losses_declare_what_they_read():
    declared = {plugin.name: set(plugin.requires(plugin.Config())) for plugin in LOSSES}
    anchored = {"advantages", "old_log_probs"}
    assert declared == dict.fromkeys(declared, anchored) | {
        "gpg": {"advantages"},
        "reinforce": {"advantages"},
        "dppo": {"advantages", "rollout_log_probs"},
    }
    before = {plugin.name for plugin in LOSSES if plugin.prepares(plugin.Config())}
    assert before == {"clip_cov", "kl_cov"}
