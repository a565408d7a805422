"""DRO: a quadratic penalty in place of the clip (arXiv 2405.19107)."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces import LossInputs, PolicyLoss, TokenLosses
from dovetail_algorithms.config.losses import DroConfig
from dovetail_algorithms.losses.ratio import (
    as_numbers,
    clip_metrics,
    log_ratio,
    ratio_metrics,
    with_slopes,
)


class Dro(PolicyLoss):
    """L = −(A · log π − ½ beta · (log π − log π_old)²).

    Paper: Direct Reward Optimisation, arXiv 2405.19107, by token here. No importance ratio multiplies the
    gradient: the square draws the policy back to where the rollouts came from, and in equilibrium
    log π − log π_old = A / beta (the paper's τ; 1 by default).

    For data that is far off-policy, where ratios would be useless. Aggregation: any; `token_mean` weighs tokens alike.
    Nothing is clipped, so the clip shares are 0.
    """

    name = "dro"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = DroConfig

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"advantages", "old_log_probs"})

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Losses [T], and the ratio's metrics."""
        log_probs_T, old_T = inputs.log_probs_T, inputs.columns["old_log_probs"]
        advantages_T, beta = inputs.columns["advantages"], self.config.beta
        # Not clamped as a ratio is: the pull grows with the distance, and nothing overflows.
        distance_T = log_probs_T.detach() - old_T
        values_T = (
            distance_T.square()
            .mul_(beta / 2)
            .addcmul_(advantages_T, log_probs_T.detach(), value=-1)
        )
        slopes_T = distance_T.mul_(beta).sub_(advantages_T)

        log_ratio_T = log_ratio(log_probs_T, old_T)
        ratio_T = log_ratio_T.exp()
        tokens, weights_T = inputs.mask_T.count_nonzero(), as_numbers(inputs.mask_T, ratio_T)
        metrics = clip_metrics(tokens) | ratio_metrics(ratio_T, log_ratio_T, weights_T, tokens)
        return TokenLosses(losses_T=with_slopes(values_T, slopes_T, log_probs_T), metrics=metrics)
