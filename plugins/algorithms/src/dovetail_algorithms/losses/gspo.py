"""GSPO: one ratio a sequence, clipped as a whole (arXiv 2507.18071)."""

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

    Paper: Group Sequence Policy Optimization, arXiv 2507.18071. The reward belongs to the sequence, so its
    importance ratio does too: length-normalised, hence bounds of a few 1e-4 (3e-4 and 4e-4). Steadier than a
    token's ratio, for mixture-of-experts models above all, whose experts change between updates.

    Every token holds its sequence's loss, with log s in the paper's token form log π − sg(log π) + sg(log s), so that
    `seq_mean_token_mean`, the aggregation that the paper prescribes, gives its objective and gradient; advantages
    that differ from token to token (GSPO-token) weigh each token's own. Clip shares count tokens;
    `actor/approx_kl` is of the tokens' ratios, mean and maximum of the sequences'.

    No token's log-ratio is clamped. Where log s is above 20, s is exp(20) and the sequence has no gradient, so that exp
    does not overflow. The log-ratios of `actor/approx_kl` are clamped to ±20.
    """

    name = "gspo"
    Config = GspoConfig
    aggregation = "seq_mean_token_mean"

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Return losses [T], and metrics: shares of tokens in clipped sequences, and the ratio's."""
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
