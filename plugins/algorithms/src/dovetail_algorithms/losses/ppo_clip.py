"""PPO's clipped loss (arXiv 1707.06347), with asymmetric bounds (DAPO, 2503.14476) and dual clip (1912.09729)."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.interfaces.policy_loss import LossInputs, PolicyLoss, TokenLosses
from dovetail.numerics import mean_metric
from dovetail_algorithms.config.losses import PpoClipConfig
from dovetail_algorithms.losses.ratio import log_ratio, ratio_metrics


class PpoClip(PolicyLoss):
    """L = max(−A ρ, −A · clip(ρ, 1 − clip_low, 1 + clip_high)), ρ = exp(clamp(log π − log π_old, ±20)).

    Where A < 0, L is capped at −A · dual_clip, which bounds it where ρ has grown large.
    """

    name = "ppo_clip"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = PpoClipConfig

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"advantages", "old_log_probs"})

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Losses [T], and metrics: shares of tokens where a bound took the gradient away, and the ratio's."""
        advantages_T = inputs.columns["advantages"]
        log_ratio_T = log_ratio(inputs.log_probs_T, inputs.columns["old_log_probs"])
        ratio_T = log_ratio_T.exp()
        clipped_ratio_T = ratio_T.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        plain_T, clipped_T = -advantages_T * ratio_T, -advantages_T * clipped_ratio_T
        losses_T = torch.maximum(plain_T, clipped_T)

        tokens = inputs.mask_T.sum()
        negative_T = advantages_T < 0
        bound_T = clipped_T.detach() > plain_T.detach()
        metrics = {
            "actor/clip_frac": mean_metric(bound_T, inputs.mask_T, tokens),
            "actor/clip_frac_upper": mean_metric(bound_T & ~negative_T, inputs.mask_T, tokens),
            "actor/clip_frac_lower": mean_metric(bound_T & negative_T, inputs.mask_T, tokens),
            **ratio_metrics(log_ratio_T, ratio_T, inputs.mask_T, tokens),
        }
        if self.config.dual_clip is not None:
            cap_T = -advantages_T * self.config.dual_clip
            capped_T = negative_T & (losses_T.detach() > cap_T)
            losses_T = torch.where(capped_T, cap_T, losses_T)
            metrics["actor/dual_clip_frac"] = mean_metric(capped_T, inputs.mask_T, tokens)
        return TokenLosses(losses_T=losses_T, metrics=metrics)
