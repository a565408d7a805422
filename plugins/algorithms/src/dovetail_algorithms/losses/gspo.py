"""GSPO: one ratio a sequence, clipped as a whole (arXiv 2507.18071)."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces import LossInputs, PolicyLoss, TokenLosses
from dovetail_algorithms.config.losses import GspoConfig
from dovetail_algorithms.losses.ratio import (
    LOG_RATIO_BOUND,
    as_numbers,
    clip_metrics,
    clipped_surrogate,
    ratio_metrics,
    sequence_ratio,
    with_slopes,
)


class Gspo(PolicyLoss):
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
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = GspoConfig
    aggregation = "seq_mean_token_mean"

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"advantages", "old_log_probs"})

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Losses [T], and metrics: shares of tokens in clipped sequences, and the ratio's."""
        log_probs_T, advantages_T = inputs.log_probs_T, inputs.columns["advantages"]
        log_ratio_T = log_probs_T.detach() - inputs.columns["old_log_probs"]
        tokens, weights_T = inputs.mask_T.count_nonzero(), as_numbers(inputs.mask_T, log_ratio_T)
        sequence_T = sequence_ratio(log_ratio_T, weights_T, inputs.offsets_N1)
        found = clipped_surrogate(
            sequence_T,
            advantages_T,
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
        )

        metrics = clip_metrics(tokens, found.upper_T, found.lower_T)
        log_ratio_T.clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        metrics |= ratio_metrics(log_ratio_T.exp(), log_ratio_T, weights_T, tokens, sequence_T)
        # log s in token form has the slope of the token's own log-probability, 1.
        return TokenLosses(
            losses_T=with_slopes(found.values_T, found.slopes_T, log_probs_T), metrics=metrics
        )
