"""SAPO: a soft gate in place of the clip (arXiv 2511.20347)."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces import LossInputs, PolicyLoss, TokenLosses
from dovetail_algorithms.config.losses import SapoConfig
from dovetail_algorithms.losses.ratio import (
    as_numbers,
    clip_metrics,
    log_ratio,
    ratio_metrics,
    with_slopes,
)


class Sapo(PolicyLoss):
    """L = −A · f(ρ), f(x) = sigmoid(τ (x − 1)) · 4 / τ, τ = tau_positive where A > 0 and tau_negative elsewhere.

    Paper: Soft Adaptive Policy Optimization, arXiv 2511.20347; ρ = exp(clamp(log π − log π_old, ±20)). The slope of f
    is 1 at ρ = 1 and fades smoothly on both sides, where PPO's falls to 0 at once. A larger τ fades sooner:
    tau_negative = 1.05 over tau_positive = 1, because negative advantages raise many unlikely tokens at a time.

    For mixture-of-experts models and several updates per rollout. Aggregation: `seq_mean_token_mean`, as in the paper.
    Nothing is clipped, so the clip shares are 0.
    """

    name = "sapo"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = SapoConfig
    aggregation = "seq_mean_token_mean"

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"advantages", "old_log_probs"})

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Losses [T], and the ratio's metrics."""
        log_probs_T, advantages_T = inputs.log_probs_T, inputs.columns["advantages"]
        log_ratio_T = log_ratio(log_probs_T, inputs.columns["old_log_probs"])
        ratio_T = log_ratio_T.exp()
        positive, negative = self.config.tau_positive, self.config.tau_negative
        tau_T = as_numbers(advantages_T > 0, ratio_T).mul_(positive - negative).add_(negative)
        gate_T = (ratio_T - 1).mul_(tau_T).sigmoid_()
        scale_T = -4 * advantages_T

        tokens, weights_T = inputs.mask_T.count_nonzero(), as_numbers(inputs.mask_T, ratio_T)
        metrics = clip_metrics(tokens) | ratio_metrics(ratio_T, log_ratio_T, weights_T, tokens)
        values_T = scale_T * gate_T / tau_T
        slopes_T = scale_T * ratio_T * gate_T * (1 - gate_T)
        return TokenLosses(losses_T=with_slopes(values_T, slopes_T, log_probs_T), metrics=metrics)
