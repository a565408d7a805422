"""Clip-Cov: PPO's loss without the gradient of a few tokens of high covariance (arXiv 2505.22617)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dovetail.batch import Batch, Column, Ragged
from dovetail.interfaces import LossInputs, PluginConfig, Reduction, TokenLosses
from dovetail_algorithms.config.losses import ClipCovConfig
from dovetail_algorithms.losses.covariance import PREPARES, covariances
from dovetail_algorithms.losses.ratio import (
    RatioLoss,
    bounded_log_ratio,
    clipped_surrogate,
    ratio_metrics,
)
from dovetail_stages import share_metric

CHOSEN = "clip_cov_detached"


class ClipCovLoss(RatioLoss):
    """L = 0 on the selected tokens, max(−A ρ, −A · clip(ρ, 1 − clip_low, 1 + clip_high)) on the others.

    Paper: The Entropy Mechanism, arXiv 2505.22617. The entropy falls with the covariance of advantage and
    log-probability, (A − mean A)(log π_old − mean log π_old), and a few tokens have most of it. A random selection of the tokens with a
    covariance in (`cov_low`, `cov_high`) = (1, 5) loses its gradient: `share` = 2e-4 of all tokens, at least one.

    Means and selection are over the whole mini-batch. The selection is by a hash of sample and position, so it does not depend on
    micro-batches, ranks or order, and is the same in several updates on one mini-batch. The loss reads `old_log_probs` before the update,
    which takes a forward pass. Aggregation: `token_mean`.
    """

    name = "clip_cov"
    Config = ClipCovConfig
    columns: ClassVar[tuple[Column, ...]] = (
        Column(CHOSEN, "float32", "ragged", "1 on tokens that Clip-Cov detaches", "actor", "response_ids"),
    )  # fmt: skip

    @classmethod
    def prepares(cls, config: PluginConfig) -> frozenset[str]:
        return PREPARES

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, Ragged]:
        config = self.config
        found = covariances(mini_batch, reduction, f"policy loss {self.name!r}", self.context.seed)
        return {
            CHOSEN: found.random_between(config.cov_low, config.cov_high, config.share, reduction)
        }

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Return losses [T], and metrics: ratio statistics, and the shares of tokens whose gradient a bound or the selection removed."""
        log_ratio_T = bounded_log_ratio(inputs.log_probs_T, inputs.columns["old_log_probs"])
        losses_T, upper_T, lower_T = clipped_surrogate(
            log_ratio_T.exp(),
            inputs.columns["advantages"],
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
        )
        chosen_T = inputs.columns[CHOSEN]
        metrics = ratio_metrics(inputs.mask_T, log_ratio_T, upper_T=upper_T, lower_T=lower_T)
        metrics["actor/clip_cov_frac"] = share_metric(chosen_T, inputs.mask_T.count_nonzero())
        return TokenLosses(losses_T=(1 - chosen_T) * losses_T, metrics=metrics)
