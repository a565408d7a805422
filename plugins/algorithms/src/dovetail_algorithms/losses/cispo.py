"""CISPO: the clipped importance ratio as a weight of the policy gradient (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

from dovetail.interfaces import LossInputs, TokenLosses
from dovetail_algorithms.config.losses import CispoConfig
from dovetail_algorithms.losses.ratio import RatioLoss, bounded_log_ratio, ratio_metrics


class CispoLoss(RatioLoss):
    """L = −sg(clip(ρ, 1 − clip_low, 1 + clip_high)) · A · log π, ρ = exp(clamp(log π − log π_old, ±20)).

    Paper: MiniMax-M1, arXiv 2506.13585. sg stops the gradient. PPO's clip removes a token's gradient. CISPO keeps the gradient of every
    token, also of rare ones that begin a new line of thought, and bounds only its weight. The paper sets only an upper bound (`clip_low:
    null`) and tunes it; the default, clip_high = 4, caps weights at 5 and so affects only outliers.

    For several updates per rollout, and for rollouts that lag behind. Aggregation: `token_mean`, as in the paper.
    """

    name = "cispo"
    Config = CispoConfig

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Return losses [T], and metrics: statistics of the ratio, and for each bound the share of tokens whose weight was clipped."""
        log_ratio_T = bounded_log_ratio(inputs.log_probs_T, inputs.columns["old_log_probs"])
        ratio_T = log_ratio_T.detach().exp()
        low, upper = self.config.clip_low, 1 + self.config.clip_high
        lower = None if low is None else 1 - low
        weights_T = ratio_T.clamp(lower, upper)
        metrics = ratio_metrics(
            inputs.mask_T,
            log_ratio_T,
            upper_T=ratio_T > upper,
            lower_T=None if lower is None else ratio_T < lower,
        )
        losses_T = -weights_T * inputs.columns["advantages"] * inputs.log_probs_T
        return TokenLosses(losses_T=losses_T, metrics=metrics)
