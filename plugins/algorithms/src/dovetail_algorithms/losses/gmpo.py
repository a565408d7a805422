"""GMPO: the geometric mean of a sequence's clipped ratios (arXiv 2507.20673)."""

from __future__ import annotations

import torch

from dovetail.interfaces import LossInputs, TokenLosses
from dovetail_algorithms.config.losses import GmpoConfig
from dovetail_algorithms.losses.ratio import RatioLoss, ratio_metrics, sequence_ratio


class GmpoLoss(RatioLoss):
    """L = −A · exp(mean over the sequence of d̂), d̂ = min(d, clip_high) where A ≥ 0, max(d, −clip_low) where A < 0.

    Paper: Geometric-Mean Policy Optimization, arXiv 2507.20673; d = log π − log π_old. Outliers move a geometric mean of ratios less than
    GRPO's arithmetic mean. This allows wide bounds on each log-ratio (±0.4) and keeps the entropy higher.

    Every token holds its sequence's loss. For the gradient, the mean is written as d̂ − sg(d̂) + sg(mean), where sg stops the gradient. So
    `seq_mean_token_mean`, the paper's aggregation, gives the paper's objective and gradient. The paper has one advantage per sequence. If
    advantages vary within a sequence, each token uses its own advantage as factor, and the advantage's sign for the bound, so that the
    sequence's ratio multiplies the mean advantage. Ratio mean and maximum are over sequences; clip shares and `actor/approx_kl` are over
    tokens.

    Nothing else bounds a token's log-ratio. A mean of d̂ above 20 counts as 20, so that exp does not overflow, and gives the sequence no
    gradient. The log-ratios of `actor/approx_kl` are clamped to ±20.
    """

    name = "gmpo"
    Config = GmpoConfig
    aggregation = "seq_mean_token_mean"

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Return losses [T], and metrics: ratio statistics, and the shares of tokens whose gradient a bound removed."""
        advantages_T = inputs.columns["advantages"]
        log_ratio_T = inputs.log_probs_T - inputs.columns["old_log_probs"]
        bounded_T = torch.where(
            advantages_T < 0,
            log_ratio_T.clamp(min=-self.config.clip_low),
            log_ratio_T.clamp(max=self.config.clip_high),
        )
        ratio_T = sequence_ratio(bounded_T, inputs.mask_T, inputs.offsets_N1)
        metrics = ratio_metrics(
            inputs.mask_T,
            log_ratio_T,
            ratio_T=ratio_T,
            upper_T=(log_ratio_T > bounded_T) & (advantages_T > 0),
            lower_T=log_ratio_T < bounded_T,
        )
        return TokenLosses(losses_T=-advantages_T * ratio_T, metrics=metrics)
