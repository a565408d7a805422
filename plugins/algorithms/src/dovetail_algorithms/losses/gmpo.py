"""GMPO: the geometric mean of a sequence's clipped ratios (arXiv 2507.20673)."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.interfaces import LossInputs, PolicyLoss, TokenLosses
from dovetail_algorithms.config.losses import GmpoConfig
from dovetail_algorithms.losses.ratio import (
    LOG_RATIO_BOUND,
    RATIO_BOUND,
    as_numbers,
    clip_metrics,
    ratio_metrics,
    sequence_ratio,
    with_slopes,
)


class Gmpo(PolicyLoss):
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
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = GmpoConfig
    aggregation = "seq_mean_token_mean"

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"advantages", "old_log_probs"})

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Losses [T], and metrics: shares of tokens where a bound took the gradient away, and the ratio's."""
        log_probs_T, advantages_T = inputs.log_probs_T, inputs.columns["advantages"]
        log_ratio_T = log_probs_T.detach() - inputs.columns["old_log_probs"]
        low, high = self.config.clip_low, self.config.clip_high
        # ±1, with which a bound from below is one from above.
        sign_T = as_numbers(advantages_T < 0, log_ratio_T).mul_(-2).add_(1)
        bounded_T = torch.minimum(sign_T * log_ratio_T, log_ratio_T.clamp(-low, high).mul_(sign_T))
        bounded_T.mul_(sign_T)
        tokens, weights_T = inputs.mask_T.count_nonzero(), as_numbers(inputs.mask_T, log_ratio_T)
        sequence_T = sequence_ratio(bounded_T, weights_T, inputs.offsets_N1)
        free_T = (bounded_T == log_ratio_T) & (sequence_T < RATIO_BOUND)
        values_T = -(advantages_T * sequence_T)

        upper_T = (log_ratio_T > bounded_T) & (advantages_T > 0)
        metrics = clip_metrics(tokens, upper_T, log_ratio_T < bounded_T)
        log_ratio_T.clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        metrics |= ratio_metrics(log_ratio_T.exp(), log_ratio_T, weights_T, tokens, sequence_T)
        # The mean in token form has the slope of the token's own bounded log-ratio: 1, or 0 at a bound.
        slopes_T = values_T * as_numbers(free_T, values_T)
        return TokenLosses(losses_T=with_slopes(values_T, slopes_T, log_probs_T), metrics=metrics)
