"""Every policy loss against a slow loop written from its paper: values, gradients and metrics.

An oracle gets one sequence at a time, as lists, without masked tokens. It returns each token's loss and slope, dL/d log π,
by the paper's formula. The test's total is the sum over sequences of each sequence's mean over tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

from dovetail.interfaces import LossInputs, PluginContext
from dovetail.metrics import values
from dovetail.sections import PluginSection
from dovetail_algorithms.config import losses as config
from dovetail_algorithms.losses.cispo import CispoLoss
from dovetail_algorithms.losses.clip_cov import ClipCovLoss
from dovetail_algorithms.losses.dppo import DppoLoss
from dovetail_algorithms.losses.dro import DroLoss
from dovetail_algorithms.losses.gmpo import GmpoLoss
from dovetail_algorithms.losses.gpg import GpgLoss
from dovetail_algorithms.losses.gspo import GspoLoss
from dovetail_algorithms.losses.kl_cov import ROUNDING, KlCovLoss
from dovetail_algorithms.losses.ppo_clip import PpoClipLoss
from dovetail_algorithms.losses.reinforce import ReinforceLoss
from dovetail_algorithms.losses.sapo import SapoLoss
from dovetail_stages import resolve_metrics
from dovetail_stages.numerics.loss_aggregation import mean_by_sample


@dataclass
class Token:
    advantage: float
    log_prob: float
    old: float
    kept: bool = True
    chosen: bool = False

    @property
    def log_ratio(self):
        return min(max(self.log_prob - self.old, -20.0), 20.0)


class Found(NamedTuple):
    """An oracle's result for one token."""

    loss: float
    slope: float
    """dL/d log π."""
    ratio: float | None = None
    side: str = ""


def clip(value, low, high):
    return min(max(value, low), high)


def clipped(cfg, advantage, ratio):
    """Return PPO's loss and slope, and the side on which the clip takes effect."""
    plain = -advantage * ratio
    bounded = -advantage * clip(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high)
    if bounded > plain:
        return bounded, 0.0, "upper" if ratio > 1 else "lower"
    return plain, plain, ""


def in_reach(log_ratio):
    """Return whether the log-ratio is within the bound, so that the ratio has a gradient."""
    return abs(log_ratio) <= 20


def ppo_clip(cfg, tokens):
    for token in tokens:
        ratio = math.exp(token.log_ratio)
        loss, slope, side = clipped(cfg, token.advantage, ratio)
        cap = math.inf
        if token.advantage < 0 and cfg.dual_clip is not None:
            cap = -token.advantage * cfg.dual_clip
        free = loss <= cap and in_reach(token.log_prob - token.old)
        yield Found(min(loss, cap), slope * free, ratio, side)


def gspo(cfg, tokens):
    mean = math.fsum(token.log_prob - token.old for token in tokens) / len(tokens)
    ratio = math.exp(min(mean, 20.0))
    for token in tokens:
        loss, slope, side = clipped(cfg, token.advantage, ratio)
        yield Found(loss, slope * (mean <= 20), ratio, side)


def gmpo(cfg, tokens):
    used, sides = [], []
    for token in tokens:
        log_ratio = token.log_prob - token.old
        bounded = clip(log_ratio, -cfg.clip_low, cfg.clip_high)
        least = min(log_ratio, bounded) if token.advantage >= 0 else max(log_ratio, bounded)
        cut = "upper" if least < log_ratio else "lower" if least > log_ratio else ""
        used.append(least)
        sides.append(cut)
    mean = math.fsum(used) / len(used)
    ratio = math.exp(min(mean, 20.0))
    for token, side in zip(tokens, sides, strict=True):
        loss = -token.advantage * ratio
        counted = side if token.advantage else ""
        yield Found(loss, loss * (not side and mean <= 20), ratio, counted)


def cispo(cfg, tokens):
    for token in tokens:
        ratio = math.exp(token.log_ratio)
        low = 0.0 if cfg.clip_low is None else 1 - cfg.clip_low
        weight = clip(ratio, low, 1 + cfg.clip_high)
        side = "upper" if weight < ratio else "lower" if weight > ratio else ""
        slope = -weight * token.advantage
        yield Found(slope * token.log_prob, slope, ratio, side)


def sapo(cfg, tokens):
    for token in tokens:
        tau = cfg.tau_positive if token.advantage > 0 else cfg.tau_negative
        ratio = math.exp(token.log_ratio)
        above, below = (0.5 + 0.5 * math.tanh(sign * tau * (ratio - 1) / 2) for sign in (1, -1))
        slope = -token.advantage * 4 * above * below * ratio
        free = in_reach(token.log_prob - token.old)
        yield Found(-token.advantage * 4 / tau * above, slope * free, ratio)


def policy_gradient(cfg, tokens):
    for token in tokens:
        yield Found(-token.advantage * token.log_prob, -token.advantage)


def clip_cov(cfg, tokens):
    for token in tokens:
        ratio = math.exp(token.log_ratio)
        loss, slope, side = clipped(cfg, token.advantage, ratio)
        free = not token.chosen and in_reach(token.log_prob - token.old)
        yield Found(0.0 if token.chosen else loss, slope * free, ratio, side)


def kl_cov(cfg, tokens):
    for token in tokens:
        ratio = math.exp(token.log_ratio)
        apart = token.log_prob - token.old
        plain = -token.advantage * ratio
        pull = math.copysign(cfg.coef, apart) if token.chosen and abs(apart) > ROUNDING else 0.0
        yield Found(plain + pull * apart, plain * in_reach(apart) + pull, ratio)


def dppo(cfg, tokens):
    for token in tokens:
        p, q = math.exp(token.log_prob), math.exp(token.old)
        if cfg.divergence == "total_variation":
            far = abs(p - q) > (cfg.threshold or 0.15)
        else:
            rest = (1 - q) * math.log((1 - q) / max(1 - p, 1e-12)) if q < 1 else 0.0
            far = q * (token.old - token.log_prob) + rest > (cfg.threshold or 0.05)
        side = "upper" if token.advantage > 0 and p > q else ""
        side = "lower" if token.advantage <= 0 and p < q else side
        ratio = math.exp(token.log_ratio)
        slope = 0.0 if far and side else -token.advantage * min(ratio, 20.0)
        yield Found(slope * token.log_prob, slope, ratio, side if far else "")


def dro(cfg, tokens):
    for token in tokens:
        apart = token.log_prob - token.old
        objective = token.log_prob * token.advantage - 0.5 * cfg.beta * apart**2
        slope = -token.advantage + cfg.beta * apart
        yield Found(-objective, slope, math.exp(token.log_ratio))


class Case(NamedTuple):
    plugin: type
    config: object
    oracle: Callable


CASES = {
    "ppo_clip": Case(PpoClipLoss, config.PpoClipConfig(), ppo_clip),
    "ppo_clip asymmetric": Case(PpoClipLoss, config.PpoClipConfig(clip_high=0.28), ppo_clip),
    "ppo_clip not dual": Case(PpoClipLoss, config.PpoClipConfig(dual_clip=None), ppo_clip),
    "ppo_clip all": Case(
        PpoClipLoss, config.PpoClipConfig(clip_low=0.1, clip_high=0.5, dual_clip=1.5), ppo_clip
    ),
    "ppo_clip unbounded below": Case(PpoClipLoss, config.PpoClipConfig(clip_low=1.0), ppo_clip),
    "gspo": Case(GspoLoss, config.GspoConfig(), gspo),
    "gspo wide": Case(GspoLoss, config.GspoConfig(clip_low=0.3, clip_high=0.6), gspo),
    "gmpo": Case(GmpoLoss, config.GmpoConfig(), gmpo),
    "gmpo asymmetric": Case(GmpoLoss, config.GmpoConfig(clip_low=0.2, clip_high=1.0), gmpo),
    "cispo": Case(CispoLoss, config.CispoConfig(), cispo),
    "cispo both bounds": Case(CispoLoss, config.CispoConfig(clip_low=0.2, clip_high=0.2), cispo),
    "sapo": Case(SapoLoss, config.SapoConfig(), sapo),
    "sapo one tau": Case(SapoLoss, config.SapoConfig(tau_positive=2.0, tau_negative=0.5), sapo),
    "gpg": Case(GpgLoss, PluginSection(), policy_gradient),
    "reinforce": Case(ReinforceLoss, PluginSection(), policy_gradient),
    "clip_cov": Case(ClipCovLoss, config.ClipCovConfig(clip_high=0.28), clip_cov),
    "kl_cov": Case(KlCovLoss, config.KlCovConfig(coef=0.7), kl_cov),
    "dppo": Case(DppoLoss, config.DppoConfig(), dppo),
    "dppo kl": Case(DppoLoss, config.DppoConfig(divergence="binary_kl"), dppo),
    "dppo tight": Case(DppoLoss, config.DppoConfig(divergence="binary_kl", threshold=0.001), dppo),
    "dro": Case(DroLoss, config.DroConfig(), dro),
    "dro weak": Case(DroLoss, config.DroConfig(beta=0.05), dro),
}


def sequences(log_prob, old):
    """Generate sequences with one advantage each, also 0, with tool tokens, and empty sequences."""

    def build(advantage, rows):
        return [Token(advantage, *row) for row in rows]

    token = st.tuples(log_prob, old, st.booleans(), st.booleans())
    advantage = st.one_of(st.just(0.0), st.floats(-3, 3))
    return st.lists(st.builds(build, advantage, st.lists(token, max_size=6)), max_size=4)


def run(case, rows, dtype=torch.float64):
    """Return token losses, the gradient of the sum of the sequences' mean losses, and metrics."""
    flat = [token for row in rows for token in row]
    # By the interface, masked tokens hold 0.
    column = lambda name: torch.tensor([getattr(t, name) * t.kept for t in flat], dtype=dtype)  # noqa: E731
    inputs = LossInputs(
        log_probs_T=column("log_prob").requires_grad_(),
        mask_T=column("kept").bool(),
        offsets_N1=torch.tensor([0, *np.cumsum([len(row) for row in rows], dtype=int)]),
        columns={
            "advantages": column("advantage"),
            "old_log_probs": column("old"),
            "rollout_log_probs": column("old"),
            "clip_cov_detached": column("chosen"),
            "kl_cov_penalised": column("chosen"),
        },
    )
    result = case.plugin(case.config, PluginContext()).token_losses(inputs)
    total = mean_by_sample(result.losses_T, inputs.mask_T, inputs.offsets_N1).sum()
    (gradient_T,) = torch.autograd.grad(total, inputs.log_probs_T)
    kept = inputs.mask_T.numpy()
    assert not gradient_T.numpy()[~kept].any()
    metrics = values(resolve_metrics([result.metrics]))
    return result.losses_T.detach().numpy()[kept], gradient_T.numpy()[kept], metrics


def expected(case, rows):
    kept = [[token for token in row if token.kept] for row in rows]
    return [list(case.oracle(case.config, row)) if row else [] for row in kept]


def assert_equal(found, losses, gradient, rows, tolerance):
    """Compare values and gradients, within the rounding error of the terms of each token's loss."""
    flat = [token for row in found for token in row]
    kept = [[token for token in row if token.kept] for row in rows]
    sizes = [
        max(
            1.0, abs(token.advantage) * math.exp(token.log_ratio), (token.log_prob - token.old) ** 2
        )
        for row in kept
        for token in row
    ]
    want = [token.slope / len(row) for row in found for token in row]
    for got, expected in ((losses, [token.loss for token in flat]), (gradient, want)):
        apart = np.abs(np.array(got, np.float64) - expected)
        assert np.all(apart <= tolerance * (np.array(sizes) + np.abs(expected)))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@given(rows=sequences(st.floats(-45, 0), st.floats(-45, 0)))
@example(rows=[[Token(0.0, 0.0, -1e-5, chosen=True), Token(0.0, 0.0, -1.1e-5, chosen=True)]])
def test_values_gradients_and_metrics_equal_the_oracle(case, rows):
    losses, gradient, metrics = run(case, rows)
    found = expected(case, rows)
    assert_equal(found, losses, gradient, rows, 1e-12)
    found = [token for row in found for token in row]
    if not found or found[0].ratio is None:
        assert not metrics or not found
        return
    count = len(found)
    ratios = [token.ratio for token in found]
    sides = [token.side for token in found]
    kept = [token for row in rows for token in row if token.kept]
    kl = math.fsum(math.exp(t.log_ratio) - 1 - t.log_ratio for t in kept) / count
    want = {
        "actor/clip_frac_upper": sides.count("upper") / count,
        "actor/clip_frac_lower": sides.count("lower") / count,
        "actor/clip_frac": (count - sides.count("")) / count,
        "actor/ratio_mean": math.fsum(ratios) / count,
        "actor/ratio_max": max(ratios),
        "actor/approx_kl": kl,
    }
    assert {name: metrics[name] for name in want} == pytest.approx(want, rel=1e-6, abs=1e-9)


# Differences of these numbers are exact in float32, so that the oracle and the loss get the same ratios.
exact = st.integers(-20 * 1024, 0).map(lambda number: number / 1024)
near = st.integers(-1024, 1024).map(lambda number: number / 1024)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@given(rows=sequences(exact, near))
def test_values_and_gradients_equal_the_oracle_in_float32(case, rows):
    rows = [
        [replace(t, advantage=float(np.float32(t.advantage)), old=t.log_prob - t.old) for t in row]
        for row in rows
    ]
    losses, gradient, _ = run(case, rows, torch.float32)
    assert_equal(expected(case, rows), losses, gradient, rows, 1e-6)


EDGES = {
    "ppo_clip, upper": (PpoClipLoss, config.PpoClipConfig(clip_high=1.0), 2.0, 1.0),
    "ppo_clip, lower": (PpoClipLoss, config.PpoClipConfig(clip_low=0.5), 0.5, -1.0),
    "ppo_clip, dual": (PpoClipLoss, config.PpoClipConfig(dual_clip=2.0), 2.0, -1.0),
    "ppo_clip, closed, upper": (
        PpoClipLoss,
        config.PpoClipConfig(clip_low=0.0, clip_high=0.0),
        1.0,
        1.0,
    ),
    "ppo_clip, closed, lower": (
        PpoClipLoss,
        config.PpoClipConfig(clip_low=0.0, clip_high=0.0),
        1.0,
        -1.0,
    ),
    "gspo, upper": (GspoLoss, config.GspoConfig(clip_high=1.0), 2.0, 1.0),
    "gspo, lower": (GspoLoss, config.GspoConfig(clip_low=0.5), 0.5, -1.0),
    "gmpo, upper": (GmpoLoss, config.GmpoConfig(clip_high=math.log(2)), 2.0, 1.0),
    "gmpo, lower": (GmpoLoss, config.GmpoConfig(clip_low=math.log(2)), 0.5, -1.0),
    "clip_cov, upper": (ClipCovLoss, config.ClipCovConfig(clip_high=1.0), 2.0, 1.0),
    "cispo": (CispoLoss, config.CispoConfig(clip_high=1.0), 2.0, 1.0),
}


@pytest.mark.parametrize(("plugin", "cfg", "ratio", "advantage"), EDGES.values(), ids=EDGES)
def test_at_the_edge_of_a_bound_a_token_keeps_its_whole_gradient(plugin, cfg, ratio, advantage):
    rows = [[Token(advantage, math.log(ratio), 0.0)]]
    _, gradient, metrics = run(Case(plugin, cfg, None), rows)
    assert gradient.tolist() == [-advantage * ratio]
    assert metrics["actor/clip_frac"] == 0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("difference", [-1e4, -90.0, 90.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_extreme_ratios_stay_finite_in_float32(case, difference, advantage):
    rows = [[Token(advantage, min(difference, 0), min(-difference, 0), chosen=True)]]
    losses, gradient, metrics = run(case, rows, torch.float32)
    assert np.isfinite([*losses, *gradient, *metrics.values()]).all()


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"gpg", "reinforce"}))
def test_every_loss_with_a_ratio_reports_the_same_metrics(name):
    _, _, metrics = run(CASES[name], [[Token(1.0, -1.0, -1.1)]])
    assert metrics.keys() >= {
        "actor/approx_kl",
        "actor/clip_frac",
        "actor/clip_frac_lower",
        "actor/clip_frac_upper",
        "actor/ratio_max",
        "actor/ratio_mean",
    }
