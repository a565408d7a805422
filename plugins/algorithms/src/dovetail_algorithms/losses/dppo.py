"""DPPO: a trust region that bounds the divergence of probabilities instead of their ratio (arXiv 2602.04879)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from dovetail.interfaces import LossInputs, PluginConfig, TokenLosses
from dovetail_algorithms.config.losses import DppoConfig
from dovetail_algorithms.losses.ratio import RatioLoss, bounded_log_ratio, ratio_metrics

MAX_RATIO = 20.0
"""Greatest importance weight of a token."""
THRESHOLDS = {"total_variation": 0.15, "binary_kl": 0.05}
"""Default threshold of each divergence."""
SMALLEST = 1e-12
"""Floor of a probability inside a logarithm."""


class DppoLoss(RatioLoss):
    """L = −A · sg(min(ρ, 20)) · log π if the token is inside the trust region or returning to it, else 0.

    Paper: Divergence PPO, arXiv 2602.04879; p and q are the probabilities of the token under π and under the rollout policy, ρ = p / q; sg
    stops the gradient. A bound on the ratio cuts rare tokens too soon and likely ones too late; a bound on the divergence does neither. The
    gradient is 0 if the divergence is above `threshold` and the update would raise it further: A > 0 and p > q, or A ≤ 0 and p < q.
    Divergences are `total_variation`, |p − q| (threshold 0.15), and `binary_kl`, q log(q/p) + (1 − q) log((1 − q)/(1 − p)) (0.05).

    The ratio is to the rollout policy: the loss needs `rollout_log_probs` and no pass for old log-probabilities, and already corrects for
    the rollout engine, so don't add importance weights. Aggregation: `token_mean`. Ratio metrics are relative to the rollout policy.
    """

    name = "dppo"
    Config = DppoConfig

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"advantages", "rollout_log_probs"})

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Return losses [T], and metrics: ratio statistics, and the shares of tokens beyond each side of the trust region."""
        log_probs_T, advantages_T = inputs.log_probs_T, inputs.columns["advantages"]
        anchor_T = inputs.columns["rollout_log_probs"]
        log_ratio_T = bounded_log_ratio(log_probs_T, anchor_T).detach()
        outside_T = self._outside(log_probs_T.detach(), anchor_T)
        upper_T = (log_ratio_T > 0) & (advantages_T > 0) & outside_T
        lower_T = (log_ratio_T < 0) & (advantages_T <= 0) & outside_T
        weights_T = log_ratio_T.exp().clamp(max=MAX_RATIO).masked_fill(upper_T | lower_T, 0)
        metrics = ratio_metrics(inputs.mask_T, log_ratio_T, upper_T=upper_T, lower_T=lower_T)
        return TokenLosses(losses_T=-advantages_T * weights_T * log_probs_T, metrics=metrics)

    def _outside(self, log_probs_T: Float[Tensor, "T"], anchor_T: Float[Tensor, "T"]) -> Tensor:
        divergence = self.config.divergence
        bound = self.config.threshold
        bound = THRESHOLDS[divergence] if bound is None else bound
        if divergence == "total_variation":
            return (log_probs_T.exp() - anchor_T.exp()).abs() > bound
        # expm1 computes 1 − p without cancellation if p is near 1.
        rest_T, anchor_rest_T = -log_probs_T.expm1(), -anchor_T.expm1()
        kl_T = anchor_T.exp() * (anchor_T - log_probs_T) + torch.xlogy(
            anchor_rest_T, anchor_rest_T.clamp(min=SMALLEST) / rest_T.clamp(min=SMALLEST)
        )
        return kl_T > bound
