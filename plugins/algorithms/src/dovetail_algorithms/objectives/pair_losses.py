"""Losses of a preference pair, from the rewards of its two responses, and the f-divergences that define these rewards.

Legend: P pairs; u = Σ_t log π(y_t) − log π_ref(y_t) of a response, in nats; a = β g(u) of the chosen response, b of the rejected one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from dovetail_algorithms.config.objectives import DpoConfig

Losses: TypeAlias = Callable[
    [Float[Tensor, "P"], Float[Tensor, "P"], DpoConfig], Float[Tensor, "P"]
]
_LARGEST_EXPONENT = 80.0
"""Bound of exponents, the same as in TRL: exp(80) is finite in float32."""


def logistic(margins_P: Float[Tensor, "P"], label_smoothing: float = 0.0) -> Float[Tensor, "P"]:
    """Return −(1 − ε) log σ(m) − ε log σ(−m) of each margin m, where ε is the label smoothing."""
    losses_P = softplus(-margins_P)
    if label_smoothing:
        losses_P = (1 - label_smoothing) * losses_P + label_smoothing * softplus(margins_P)
    return losses_P


def _robust_or_logistic(
    a: Float[Tensor, "P"], b: Float[Tensor, "P"], c: DpoConfig
) -> Float[Tensor, "P"]:
    noise = c.label_smoothing
    if not c.robust:
        return logistic(a - b, noise)
    return ((1 - noise) * softplus(b - a) - noise * softplus(a - b)) / (1 - 2 * noise)


def _exo(a: Float[Tensor, "P"], b: Float[Tensor, "P"], c: DpoConfig) -> Float[Tensor, "P"]:
    log_q, log_not_q = logsigmoid(a - b), logsigmoid(b - a)
    noise = c.label_smoothing
    return log_q.exp() * (log_q - math.log1p(-noise)) + log_not_q.exp() * (
        log_not_q - math.log(noise)
    )


def _discopop(a: Float[Tensor, "P"], b: Float[Tensor, "P"], c: DpoConfig) -> Float[Tensor, "P"]:
    share = torch.sigmoid((a - b) / c.discopop_tau)
    return (1 - share) * softplus(b - a) + share * torch.exp(b - a)


PAIR_LOSSES: Mapping[str, Losses] = {
    "logistic": _robust_or_logistic,
    "hinge": lambda a, b, _: torch.relu(1 - (a - b)),
    "exo": _exo,
    "nca": lambda a, b, _: softplus(-a) + (softplus(a) + softplus(b)) / 2,
    "bco": lambda a, b, _: softplus(-a) + softplus(b),
    "apo_zero": lambda a, b, _: torch.sigmoid(-a) + torch.sigmoid(b),
    "apo_down": lambda a, b, _: torch.sigmoid(a) + torch.sigmoid(b - a),
    "sppo_hard": lambda a, b, c: ((a - 0.5) ** 2 + (b + 0.5) ** 2) / c.beta**2,
    "discopop": _discopop,
}
"""The pair losses by the name in `DpoConfig.loss`: functions of a, b (float [P]) and the config, which return float [P]."""


def _alpha(u: Float[Tensor, "N"], c: DpoConfig) -> Float[Tensor, "N"]:
    power = c.f_alpha - 1
    return u if abs(power) < 1e-6 else torch.expm1((power * u).clamp(max=_LARGEST_EXPONENT)) / power


F_DIVERGENCES: Mapping[str, Callable[[Float[Tensor, "N"], DpoConfig], Float[Tensor, "N"]]] = {
    "reverse_kl": lambda u, _: u,
    "forward_kl": lambda u, _: -torch.expm1(-u),
    "js": lambda u, _: math.log(2) + logsigmoid(u),
    "alpha": _alpha,
}
"""The function g of each f-divergence, by its name in `DpoConfig.f_divergence`; takes u, float [N], and the config, and returns g(u),
float [N].

g(u) = f'(exp(u)), up to a constant, where f generates the divergence and exp(u) = π/π_ref (arXiv 2309.16240, table 1).
"""
