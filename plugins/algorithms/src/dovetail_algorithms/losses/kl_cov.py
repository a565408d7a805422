"""KL-Cov: a penalty on the few tokens of highest covariance (arXiv 2505.22617)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dovetail.batch import Batch, Column, Ragged
from dovetail.interfaces import LossInputs, PluginConfig, Reduction, TokenLosses
from dovetail_algorithms.config.losses import KlCovConfig
from dovetail_algorithms.losses.covariance import PREPARES, covariances
from dovetail_algorithms.losses.ratio import RatioLoss, bounded_log_ratio, ratio_metrics
from dovetail_stages import share_metric

CHOSEN = "kl_cov_penalised"

ROUNDING = 1e-5
"""Largest rounding difference, in nats, between log-probabilities of two forward passes of the same policy."""


class KlCovLoss(RatioLoss):
    """L = −A ρ, plus coef · |d| on the selected tokens with |d| > 1e-5 nats; d = log π − log π_old, ρ = exp(clamp(d, ±20)).

    Paper: The Entropy Mechanism, arXiv 2505.22617. The entropy falls with the covariance of advantage and
    log-probability, (A − mean A)(log π_old − mean log π_old), and a few tokens have most of it. The tokens of highest covariance, `share`
    = 2e-4 of all tokens and at least one, are held near the old policy with coef = 1.

    |d| has slope ±1 however small d is, and two passes over one policy differ by rounding. So below 1e-5 nats a selected token has no
    penalty: the first update of a step, where π is π_old, uses the plain loss. Above 1e-5 nats the penalty is coef · |d| in full.

    Means and ranking are over the whole mini-batch. A hash of sample and position breaks ties, so that the selection does not depend on
    micro-batches, ranks or order. The selection needs `old_log_probs` before the update; a
    step computes them with a forward pass.
    Aggregation: `token_mean`. Nothing is clipped, so the clip shares are 0.
    """

    name = "kl_cov"
    Config = KlCovConfig
    columns: ClassVar[tuple[Column, ...]] = (
        Column(CHOSEN, "float32", "ragged", "1 on tokens that KL-Cov penalises", "actor", "response_ids"),
    )  # fmt: skip

    @classmethod
    def prepares(cls, config: PluginConfig) -> frozenset[str]:
        return PREPARES

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, Ragged]:
        found = covariances(mini_batch, reduction, f"policy loss {self.name!r}", self.context.seed)
        return {CHOSEN: found.highest(self.config.share, reduction)}

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Return losses [T], and metrics: ratio statistics, and the share of tokens penalised."""
        old_T, chosen_T = inputs.columns["old_log_probs"], inputs.columns[CHOSEN]
        log_ratio_T = bounded_log_ratio(inputs.log_probs_T, old_T)
        plain_T = -inputs.columns["advantages"] * log_ratio_T.exp()
        # Unlike the ratio, the distance is not clamped, so that the penalty keeps its gradient at any distance.
        distance_T = (inputs.log_probs_T - old_T).abs()
        # In a step's first update π is π_old, and the distance is a rounding error, whose gradient ±1 would be noise.
        penalty_T = self.config.coef * distance_T * chosen_T * (distance_T > ROUNDING)
        metrics = ratio_metrics(inputs.mask_T, log_ratio_T)
        metrics["actor/kl_cov_frac"] = share_metric(chosen_T, inputs.mask_T.count_nonzero())
        return TokenLosses(losses_T=plain_T + penalty_T, metrics=metrics)
