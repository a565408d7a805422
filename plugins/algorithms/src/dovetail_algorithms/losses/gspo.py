"""GSPO: one clipped ratio per sequence (arXiv 2507.18071)."""

from __future__ import annotations

from dovetail.interfaces import LossInputs, TokenLosses
from dovetail_algorithms.config.losses import GspoConfig
from dovetail_algorithms.losses.ratio import (
    RatioLoss,
    clipped_surrogate,
    ratio_metrics,
    sequence_ratio,
)


class GspoLoss(RatioLoss):
    """L = max(−A s, −A · clip(s, 1 − clip_low, 1 + clip_high)), s = exp(mean over the sequence of log π − log π_old).

    Paper: Group Sequence Policy Optimization, arXiv 2507.18071. The reward belongs to the sequence, so the importance ratio does too. The
    ratio is normalised by length, hence the narrow bounds (3e-4 and 4e-4). It is more stable than token ratios, above all for
    mixture-of-experts models, whose routing changes between updates.

    Every token holds its sequence's loss. For the gradient, log s is written as log π − sg(log π) + sg(log s), as in the paper, where sg
    stops the gradient. So `seq_mean_token_mean`, the paper's aggregation, gives the paper's objective and gradient. If advantages differ
    between tokens, each token uses its own (GSPO-token). Clip shares and `actor/approx_kl` are over tokens; ratio mean and maximum are over
    sequences.

    No token's log-ratio is clamped. If log s is above 20, s is exp(20), so that exp does not overflow, and the sequence has no gradient.
    The log-ratios of `actor/approx_kl` are clamped to ±20.
    """

    name = "gspo"
    Config = GspoConfig
    aggregation = "seq_mean_token_mean"

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Return losses [T], and metrics: ratio statistics, and the shares of tokens in clipped sequences."""
        log_ratio_T = inputs.log_probs_T - inputs.columns["old_log_probs"]
        ratio_T = sequence_ratio(log_ratio_T, inputs.mask_T, inputs.offsets_N1)
        losses_T, upper_T, lower_T = clipped_surrogate(
            ratio_T,
            inputs.columns["advantages"],
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
        )
        metrics = ratio_metrics(
            inputs.mask_T, log_ratio_T, ratio_T=ratio_T, upper_T=upper_T, lower_T=lower_T
        )
        return TokenLosses(losses_T=losses_T, metrics=metrics)
