"""DRO: a quadratic penalty in place of the clip (arXiv 2405.19107)."""

from __future__ import annotations

from dovetail.interfaces import LossInputs, TokenLosses
from dovetail_algorithms.config.losses import DroConfig
from dovetail_algorithms.losses.ratio import RatioLoss, ratio_metrics


class DroLoss(RatioLoss):
    """L = −(A · log π − ½ beta · (log π − log π_old)²).

    Paper: Direct Reward Optimisation, arXiv 2405.19107; here applied per token. No importance ratio multiplies the gradient: the squared
    term draws the policy back to the one that made the rollouts, and in equilibrium log π − log π_old = A / beta (the paper's τ; 1 by
    default).

    For data that is far off-policy, where ratios would be useless. Aggregation: any; `token_mean` weighs tokens alike.
    Nothing is clipped, so the clip shares are 0.
    """

    name = "dro"
    Config = DroConfig

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Return losses [T], and metrics: ratio statistics."""
        # The log-ratio is not clamped: the penalty should grow with the distance, and without exp nothing overflows.
        log_ratio_T = inputs.log_probs_T - inputs.columns["old_log_probs"]
        penalty_T = 0.5 * self.config.beta * log_ratio_T.square()
        losses_T = -(inputs.columns["advantages"] * inputs.log_probs_T - penalty_T)
        return TokenLosses(losses_T=losses_T, metrics=ratio_metrics(inputs.mask_T, log_ratio_T))
