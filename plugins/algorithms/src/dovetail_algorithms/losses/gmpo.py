"""GMPO: the geometric mean of a sequence's clipped ratios (arXiv 2507.20673)."""

from __future__ import annotations

import torch

from dovetail.interfaces import LossInputs, TokenLosses
from dovetail_algorithms.config.losses import GmpoConfig
from dovetail_algorithms.losses.ratio import RatioLoss, ratio_metrics, sequence_ratio


class GmpoLoss(RatioLoss):
    """L = −A · exp(mean over the sequence of d̂), d̂ = min(d, clip_high) where A ≥ 0, max(d, −clip_low) where A < 0.

    Paper: Geometric-Mean Policy Optimization, arXiv 2507.20673; d = log π − log π_old. A geometric mean of ratios is
    moved less by outliers than GRPO's arithmetic one, which allows wide bounds on each log-ratio (±0.4), and the
    entropy stays higher.

    Every token holds its sequence's loss, with the mean in token form (d̂ − sg(d̂) + sg(mean)), so that
    `seq_mean_token_mean`, the aggregation that the paper prescribes, gives its objective and gradient. The paper has
    one advantage a sequence; where the column varies within it, each token is bounded by the sign of its own and
    weighs its own, so that the sequence's ratio multiplies the mean of its advantages. Mean and maximum of the
    ratio are the sequences', clip shares and `actor/approx_kl` the tokens'.

    Nothing else bounds a token's log-ratio. Where the mean of d̂ is above 20, it counts as 20 and the sequence has no
    gradient, so that exp does not overflow. The log-ratios of `actor/approx_kl` are clamped to ±20.
    """

    name = "gmpo"
    Config = GmpoConfig
    aggregation = "seq_mean_token_mean"

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Return losses [T], and metrics: the shares of tokens whose gradient a bound removed, and those of the ratio."""
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
