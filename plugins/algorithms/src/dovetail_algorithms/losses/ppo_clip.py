"""PPO's clipped loss (arXiv 1707.06347), with asymmetric bounds (DAPO, 2503.14476) and dual clip (1912.09729)."""

from __future__ import annotations

from dovetail.interfaces import LossInputs, TokenLosses
from dovetail_algorithms.config.losses import PpoClipConfig
from dovetail_algorithms.losses.ratio import (
    RatioLoss,
    bounded_log_ratio,
    clipped_surrogate,
    ratio_metrics,
)
from dovetail_stages import share_metric


class PpoClipLoss(RatioLoss):
    """L = max(−A ρ, −A · clip(ρ, 1 − clip_low, 1 + clip_high)), ρ = exp(clamp(log π − log π_old, ±20)).

    Papers: PPO, arXiv 1707.06347 (clip_low = clip_high = 0.2); Clip-Higher of DAPO, 2503.14476 (0.2 and 0.28), which leaves rare tokens
    more room to grow; dual clip, 1912.09729: if A < 0, L is at most −A · dual_clip, even if ρ is large. Dual clip is on by default (3.0),
    although the papers of PPO, GRPO and DAPO have none: `dual_clip: null` gives exactly their loss.

    The default choice for training that is on-policy or a few updates off-policy. Aggregation: `token_mean` in PPO and DAPO,
    `seq_mean_token_mean` in GRPO, `seq_mean_token_sum_norm` in Dr. GRPO.
    """

    name = "ppo_clip"
    Config = PpoClipConfig

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Return losses [T], and metrics: ratio statistics, and the shares of tokens whose gradient a bound removed."""
        advantages_T, dual = inputs.columns["advantages"], self.config.dual_clip
        log_ratio_T = bounded_log_ratio(inputs.log_probs_T, inputs.columns["old_log_probs"])
        losses_T, upper_T, lower_T = clipped_surrogate(
            log_ratio_T.exp(),
            advantages_T,
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
        )
        metrics = ratio_metrics(inputs.mask_T, log_ratio_T, upper_T=upper_T, lower_T=lower_T)
        if dual is not None:
            # If A ≥ 0, the cap is 0 and has no effect, since the loss is at most 0.
            caps_T = dual * (-advantages_T).clamp(min=0)
            tokens = inputs.mask_T.count_nonzero()
            metrics["actor/dual_clip_frac"] = share_metric(losses_T > caps_T, tokens)
            losses_T = losses_T.clamp(max=caps_T)
        return TokenLosses(losses_T=losses_T, metrics=metrics)
