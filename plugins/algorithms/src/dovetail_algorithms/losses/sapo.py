"""SAPO: a soft gate in place of the clip (arXiv 2511.20347)."""

from __future__ import annotations

import torch

from dovetail.interfaces import LossInputs, TokenLosses
from dovetail_algorithms.config.losses import SapoConfig
from dovetail_algorithms.losses.ratio import RatioLoss, bounded_log_ratio, ratio_metrics


class SapoLoss(RatioLoss):
    """L = −A · f(ρ), f(x) = sigmoid(τ (x − 1)) · 4 / τ, τ = tau_positive if A > 0, else tau_negative.

    Paper: Soft Adaptive Policy Optimization, arXiv 2511.20347; ρ = exp(clamp(log π − log π_old, ±20)). The slope of f
    is 1 at ρ = 1 and fades smoothly on both sides, where PPO's falls to 0 at once. A larger τ fades sooner; tau_negative = 1.05 is above
    tau_positive = 1, because a negative advantage raises many unlikely tokens at once.

    For mixture-of-experts models and several updates per rollout. Aggregation: `seq_mean_token_mean`, as in the paper.
    Nothing is clipped, so the clip shares are 0.
    """

    name = "sapo"
    Config = SapoConfig
    aggregation = "seq_mean_token_mean"

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Return losses [T], and metrics: ratio statistics."""
        advantages_T = inputs.columns["advantages"]
        log_ratio_T = bounded_log_ratio(inputs.log_probs_T, inputs.columns["old_log_probs"])
        tau_T = torch.full_like(advantages_T, self.config.tau_negative)
        tau_T[advantages_T > 0] = self.config.tau_positive
        gate_T = torch.sigmoid(tau_T * (log_ratio_T.exp() - 1)) * 4 / tau_T
        metrics = ratio_metrics(inputs.mask_T, log_ratio_T)
        return TokenLosses(losses_T=-advantages_T * gate_T, metrics=metrics)
