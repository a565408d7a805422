"""Every policy loss against a slow loop written from its paper: values, gradients and metrics.

An oracle sees one sequence at a time, as lists, without the tokens that the mask leaves out. Gradients are those of the mean
over each sequence's tokens, summed over sequences: derivatives of the oracle by central differences, or, where the
paper stops gradients, the paper's own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from dovetail.interfaces import LossInputs, PluginContext
from dovetail.metrics import values
from dovetail.numerics import resolve_metrics
from dovetail.numerics.loss_aggregation import mean_by_sample
from dovetail_algorithms.config import losses as config
from dovetail_algorithms.losses.cispo import Cispo
from dovetail_algorithms.losses.clip_cov import ClipCov
from dovetail_algorithms.losses.dppo import Dppo
from dovetail_algorithms.losses.dro import Dro
from dovetail_algorithms.losses.gmpo import Gmpo
from dovetail_algorithms.losses.gpg import Gpg
from dovetail_algorithms.losses.gspo import Gspo
from dovetail_algorithms.losses.kl_cov import ROUNDING, KlCov
from dovetail_algorithms.losses.ppo_clip import PpoClip
from dovetail_algorithms.losses.reinforce import Reinforce
from dovetail_algorithms.losses.sapo import Sapo


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
    """What an oracle says of one token."""

    loss: float
    ratio: float | None = None
    side: str = ""
    slope: float | None = None
    """dL/d log π, where it is not the derivative of the loss."""


def clip(value, low, high):
    return min(max(value, low), high)


def clipped(cfg, advantage, ratio):
    """PPO: the loss, and the side on which the clip is what counts."""
    plain = -advantage * ratio
    bounded = -advantage * clip(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high)
    return max(plain, bounded), ("upper" if ratio > 1 else "lower") if bounded > plain else ""


def ppo_clip(cfg, tokens):
    for token in tokens:
        ratio = math.exp(token.log_ratio)
        loss, side = clipped(cfg, token.advantage, ratio)
        if token.advantage < 0 and cfg.dual_clip is not None:
            loss = min(loss, -token.advantage * cfg.dual_clip)
        yield Found(loss, ratio, side)


def gspo(cfg, tokens):
    mean = math.fsum(token.log_prob - token.old for token in tokens) / len(tokens)
    ratio = math.exp(min(mean, 20.0))
    for token in tokens:
        loss, side = clipped(cfg, token.advantage, ratio)
        yield Found(loss, ratio, side)


def gmpo(cfg, tokens):
    product, sides = 1.0, []
    for token in tokens:
        ratio = math.exp(token.log_prob - token.old)
        bounded = clip(ratio, math.exp(-cfg.clip_low), math.exp(cfg.clip_high))
        sign = 1 if token.advantage >= 0 else -1
        least = min(ratio**sign, bounded**sign) ** sign
        cut = token.advantage and not math.isclose(least, ratio, rel_tol=1e-12)
        sides.append(("upper" if sign > 0 else "lower") if cut else "")
        product *= least ** (1 / len(tokens))
    product = min(product, math.exp(20.0))
    for token, side in zip(tokens, sides, strict=True):
        yield Found(-token.advantage * product, product, side)


def cispo(cfg, tokens):
    for token in tokens:
        ratio = math.exp(token.log_ratio)
        low = 0.0 if cfg.clip_low is None else 1 - cfg.clip_low
        weight = clip(ratio, low, 1 + cfg.clip_high)
        side = "upper" if weight < ratio else "lower" if weight > ratio else ""
        slope = -weight * token.advantage
        yield Found(slope * token.log_prob, ratio, side, slope)


def sapo(cfg, tokens):
    for token in tokens:
        tau = cfg.tau_positive if token.advantage > 0 else cfg.tau_negative
        ratio = math.exp(token.log_ratio)
        gate = 4 / tau * (0.5 + 0.5 * math.tanh(tau * (ratio - 1) / 2))
        yield Found(-token.advantage * gate, ratio)


def policy_gradient(cfg, tokens):
    for token in tokens:
        yield Found(-token.advantage * token.log_prob)


def clip_cov(cfg, tokens):
    for token in tokens:
        ratio = math.exp(token.log_ratio)
        loss, side = clipped(cfg, token.advantage, ratio)
        yield Found(0.0 if token.chosen else loss, ratio, side)


def kl_cov(cfg, tokens):
    for token in tokens:
        ratio = math.exp(token.log_ratio)
        apart = abs(token.log_prob - token.old)
        penalty = cfg.coef * apart if token.chosen and apart > ROUNDING else 0.0
        yield Found(-token.advantage * ratio + penalty, ratio)


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
        yield Found(slope * token.log_prob, ratio, side if far else "", slope)


def dro(cfg, tokens):
    for token in tokens:
        square = (token.log_prob - token.old) ** 2
        objective = token.log_prob * token.advantage - 0.5 * cfg.beta * square
        yield Found(-objective, math.exp(token.log_ratio))


class Case(NamedTuple):
    plugin: type
    config: object
    oracle: Callable


CASES = {
    "ppo_clip": Case(PpoClip, config.PpoClipConfig(), ppo_clip),
    "ppo_clip asymmetric": Case(PpoClip, config.PpoClipConfig(clip_high=0.28), ppo_clip),
    "ppo_clip not dual": Case(PpoClip, config.PpoClipConfig(dual_clip=None), ppo_clip),
    "ppo_clip all": Case(
        PpoClip, config.PpoClipConfig(clip_low=0.1, clip_high=0.5, dual_clip=1.5), ppo_clip
    ),
    "ppo_clip unbounded below": Case(PpoClip, config.PpoClipConfig(clip_low=1.0), ppo_clip),
    "gspo": Case(Gspo, config.GspoConfig(), gspo),
    "gspo wide": Case(Gspo, config.GspoConfig(clip_low=0.3, clip_high=0.6), gspo),
    "gmpo": Case(Gmpo, config.GmpoConfig(), gmpo),
    "gmpo asymmetric": Case(Gmpo, config.GmpoConfig(clip_low=0.2, clip_high=1.0), gmpo),
    "cispo": Case(Cispo, config.CispoConfig(), cispo),
    "cispo both bounds": Case(Cispo, config.CispoConfig(clip_low=0.2, clip_high=0.2), cispo),
    "sapo": Case(Sapo, config.SapoConfig(), sapo),
    "sapo one tau": Case(Sapo, config.SapoConfig(tau_positive=2.0, tau_negative=0.5), sapo),
    "gpg": Case(Gpg, config.GpgConfig(), policy_gradient),
    "reinforce": Case(Reinforce, config.ReinforceConfig(), policy_gradient),
    "clip_cov": Case(ClipCov, config.ClipCovConfig(clip_high=0.28), clip_cov),
    "kl_cov": Case(KlCov, config.KlCovConfig(coef=0.7), kl_cov),
    "dppo": Case(Dppo, config.DppoConfig(), dppo),
    "dppo kl": Case(Dppo, config.DppoConfig(divergence="binary_kl"), dppo),
    "dppo tight": Case(Dppo, config.DppoConfig(divergence="binary_kl", threshold=0.001), dppo),
    "dro": Case(Dro, config.DroConfig(), dro),
    "dro weak": Case(Dro, config.DroConfig(beta=0.05), dro),
}


def sequences(log_prob, old):
    """Some sequences of one advantage each, 0 among them, with tool tokens inside, and empty ones."""

    def build(advantage, rows):
        return [Token(advantage, *row) for row in rows]

    token = st.tuples(log_prob, old, st.booleans(), st.booleans())
    advantage = st.one_of(st.just(0.0), st.floats(-3, 3))
    return st.lists(st.builds(build, advantage, st.lists(token, max_size=6)), max_size=4)


def run(case, rows, dtype=torch.float64):
    """Token losses, gradient of the sum over sequences of their means, and metrics."""
    flat = [token for row in rows for token in row]
    # Masked tokens hold 0, as the interface says.
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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@settings(max_examples=40)
@given(rows=sequences(st.floats(-45, 0), st.floats(-45, 0)))
@example(rows=[[Token(0.0, 0.0, -1e-5, chosen=True), Token(0.0, 0.0, -1.1e-5, chosen=True)]])
def test_values_and_metrics_equal_the_oracle(case, rows):
    losses, _, metrics = run(case, rows)
    found = [token for row in expected(case, rows) for token in row]
    np.testing.assert_allclose(losses, [t.loss for t in found], rtol=2e-6, atol=1e-9)
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


# Log-ratios away from every kink of every case.
STEPS = [-3.0, -0.9, -0.3, -0.15, -0.05, 0.05, 0.12, 0.3, 0.9, 1.5, 3.0]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@settings(max_examples=20)
@given(rows=sequences(st.floats(-6, -4), st.sampled_from(STEPS)))
def test_gradients_are_those_of_the_oracle(case, rows):
    rows = [[replace(t, old=t.log_prob - t.old) for t in row] for row in rows]
    _, gradient, _ = run(case, rows)
    want, step = [], 1e-6
    for row, found in zip(rows, expected(case, rows), strict=True):
        kept = [token for token in row if token.kept]
        for place, token in enumerate(kept):
            if found[place].slope is not None:
                want.append(found[place].slope / len(kept))
                continue
            sums = []
            for sign in (1, -1):
                moved = [*kept]
                moved[place] = replace(token, log_prob=token.log_prob + sign * step)
                sums.append(math.fsum(f.loss for f in case.oracle(case.config, moved)) / len(kept))
            want.append((sums[0] - sums[1]) / (2 * step))
    np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-7)


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
