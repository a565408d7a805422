"""GSPO and GMPO against their papers' formulas in float64: single tokens far from the old policy, and ratios at the clip bounds."""

import numpy as np
import pytest
import torch

from dovetail.interfaces import LossInputs, PluginContext
from dovetail_algorithms.config.losses import GmpoConfig, GspoConfig
from dovetail_algorithms.losses.gmpo import GmpoLoss
from dovetail_algorithms.losses.gspo import GspoLoss
from dovetail_stages.numerics.loss_aggregation import mean_by_sample

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def gspo(log_ratio_T, advantage, cfg):
    """Return a sequence's loss, arXiv 2507.18071 eq. 5, and its derivatives by the tokens' log-probabilities."""
    ratio = np.exp(log_ratio_T.mean())
    plain = advantage * ratio
    clipped = advantage * np.clip(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high)
    slope = plain if plain <= clipped else 0.0
    return -min(plain, clipped), np.full_like(log_ratio_T, -slope / len(log_ratio_T))


def gmpo(log_ratio_T, advantage, cfg):
    """Return a sequence's loss, arXiv 2507.20673 eq. 4 in logarithms, and its derivatives."""
    sign = np.sign(advantage)
    clipped_T = np.clip(log_ratio_T, -cfg.clip_low, cfg.clip_high)
    used_T = sign * np.minimum(sign * log_ratio_T, sign * clipped_T)
    loss = -advantage * np.exp(used_T.mean())
    return loss, loss * (used_T == log_ratio_T) / len(log_ratio_T)


def run(plugin, cfg, log_ratio_T, advantage, dtype):
    """Return a sequence's loss and gradient, and the log-ratios after rounding to the dtype."""
    count = len(log_ratio_T)
    old_T = torch.full((count,), -2.0, dtype=dtype)
    log_probs_T = (old_T + torch.as_tensor(log_ratio_T).to(dtype)).requires_grad_()
    inputs = LossInputs(
        log_probs_T=log_probs_T,
        mask_T=torch.ones(count, dtype=torch.bool),
        offsets_N1=torch.tensor([0, count]),
        columns={
            "old_log_probs": old_T,
            "advantages": torch.full((count,), advantage, dtype=dtype),
        },
    )
    losses_T = plugin(cfg, PluginContext()).token_losses(inputs).losses_T
    loss = mean_by_sample(losses_T, inputs.mask_T, inputs.offsets_N1).sum()
    loss.backward()
    differences_T = log_probs_T.detach().double() - old_T.double()
    return loss.item(), log_probs_T.grad.double().numpy(), differences_T.numpy()


def small(count=50):
    return np.random.default_rng(0).normal(0, 0.05, count)


def with_outlier(outlier):
    log_ratio_T = small()
    log_ratio_T[7] = outlier
    return log_ratio_T


LOG_RATIOS = {
    "near": small(),
    "a token at -100": with_outlier(-100.0),
    "a token at 100": with_outlier(100.0),
    "a token at -30 of 3": np.array([0.1, -30.0, -0.2]),
    "two at -100 and 70": np.array([0.1, -100.0, 70.0, 0.3]),
    # On both sides of the ratio's bounds 1 - 3e-4 and 1 + 4e-4 (GSPO), and of the log-ratio's bound 0.4 (GMPO).
    "below gspo's lower edge": np.full(8, np.log(1 - 3e-4) - 5e-7),
    "above gspo's lower edge": np.full(8, np.log(1 - 3e-4) + 5e-7),
    "below gspo's upper edge": np.full(8, np.log(1 + 4e-4) - 5e-7),
    "above gspo's upper edge": np.full(8, np.log(1 + 4e-4) + 5e-7),
    "gmpo's edges": np.array([-0.4, 0.4, -0.400001, -0.399999, 0.399999, 0.400001]),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("advantage", [-1.5, 0.7])
@pytest.mark.parametrize(
    ("plugin", "cfg", "oracle"),
    [
        (GspoLoss, GspoConfig(), gspo),
        (GspoLoss, GspoConfig(clip_low=0.9, clip_high=8.0), gspo),
        (GmpoLoss, GmpoConfig(), gmpo),
        (GmpoLoss, GmpoConfig(clip_low=50.0, clip_high=60.0), gmpo),
    ],
    ids=["gspo", "gspo wide", "gmpo", "gmpo wide"],
)
@pytest.mark.parametrize("log_ratio_T", LOG_RATIOS.values(), ids=LOG_RATIOS)
def test_the_sequences_loss_and_gradient_are_the_papers(
    log_ratio_T, plugin, cfg, oracle, advantage, dtype
):
    loss, gradient_T, given_T = run(plugin, cfg, log_ratio_T, advantage, dtype)
    want, slopes_T = oracle(given_T, advantage, cfg)
    exact = {"rtol": TOLERANCE[dtype], "atol": 0.0}
    np.testing.assert_allclose(loss, want, **exact)
    np.testing.assert_allclose(gradient_T, slopes_T, **exact)


@pytest.mark.parametrize("plugin", [GspoLoss, GmpoLoss])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_sequence_above_the_bound_of_its_exponent_has_a_finite_loss_and_no_gradient(
    plugin, dtype
):
    loss, gradient_T, _ = run(plugin, plugin.Config(), np.array([200.0, 10.0]), -1.0, dtype)
    np.testing.assert_allclose(loss, np.exp(20.0), rtol=2e-6)
    assert not gradient_T.any()
    loss, gradient_T, _ = run(plugin, plugin.Config(), np.array([30.0, 9.0]), -1.0, dtype)
    np.testing.assert_allclose(gradient_T, np.exp(19.5) / 2, rtol=1e-6)
