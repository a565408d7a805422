"""The probability ratio of the policy to an older policy, PPO's clipped loss of this ratio, and metrics.

Masked tokens hold 0 in all inputs of a loss, so that their log-ratio and advantage are 0. T tokens, N samples.
"""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dovetail.interfaces import PluginConfig, PolicyLoss
from dovetail.metrics import Max, Metric
from dovetail_stages import mean_metric, share_metric, sum_by_sample

LOG_RATIO_BOUND = 20.0
"""Bound of the absolute log-ratio, so that exp does not overflow."""


class RatioLoss(PolicyLoss):
    """Base of losses that use the probability ratio of the current policy to the policy before the updates."""

    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"advantages", "old_log_probs"})


def bounded_log_ratio(
    log_probs_T: Float[Tensor, "T"], old_log_probs_T: Float[Tensor, "T"]
) -> Float[Tensor, "T"]:
    """Compute clamp(log_probs − old_log_probs, ±20), float [T].

    Beyond the bound the result has no gradient, so that one broken token can't outweigh a batch.
    """
    return (log_probs_T - old_log_probs_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def sequence_ratio(
    log_ratio_T: Float[Tensor, "T"], mask_T: Bool[Tensor, "T"], offsets_N1: Int64[Tensor, "N1"]
) -> Float[Tensor, "T"]:
    """Return each token's sequence-level probability ratio, exp(min(sg(log s) + d − sg(d), 20)) (GSPO-token, arXiv 2507.18071).

    d is the token's log-ratio, log s is the mean of d over the sequence's response tokens, and sg stops the gradient. So the value is
    min(s, exp(20)) at every token of a sequence, and the gradient reaches each token through its own d. The bound keeps exp from
    overflowing; a sequence beyond the bound has no gradient.

    Args:
        log_ratio_T: the log-ratios, float [T], not clamped, 0 where the mask is False.
        mask_T: the response mask, bool [T].
        offsets_N1: the index of each sample's first token, followed by T, int64 [N + 1].

    Returns:
        The ratios, float [T], in the log-ratios' dtype.
    """
    # Sum in float64: in a float32 sum, one large log-ratio would cost the small ones their last digits.
    sums_N = sum_by_sample(log_ratio_T.detach().double(), offsets_N1)
    means_N = sums_N / sum_by_sample(mask_T.double(), offsets_N1).clamp(min=1)
    means_T = means_N.repeat_interleave(offsets_N1.diff(), output_size=log_ratio_T.shape[0])
    log_s_T = means_T + (log_ratio_T - log_ratio_T.detach())
    return log_s_T.clamp(max=LOG_RATIO_BOUND).exp().to(log_ratio_T.dtype)


def clipped_surrogate(
    ratio_T: Float[Tensor, "T"],
    advantages_T: Float[Tensor, "T"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, "T"], Bool[Tensor, "T"], Bool[Tensor, "T"]]:
    """Return PPO's loss (arXiv 1707.06347, eq. 7): max(−Aρ, −A clip(ρ, 1 − clip_low, 1 + clip_high)).

    Args:
        ratio_T: the probability ratios ρ, float [T].
        advantages_T: the advantages A, float [T].
        clip_low: how far below 1 the ratio may fall where the advantage is negative.
        clip_high: how far above 1 the ratio may rise where the advantage is positive.

    Returns:
        The losses, float [T]; and masks of the tokens whose gradient the upper and the lower bound remove, bool [T] each.
    """
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    bound_T = clipped_T > plain_T
    upper_T, lower_T = bound_T & (advantages_T > 0), bound_T & (advantages_T < 0)
    return torch.maximum(plain_T, clipped_T), upper_T, lower_T


def ratio_metrics(
    mask_T: Bool[Tensor, "T"],
    log_ratio_T: Float[Tensor, "T"],
    *,
    ratio_T: Float[Tensor, "T"] | None = None,
    upper_T: Bool[Tensor, "T"] | None = None,
    lower_T: Bool[Tensor, "T"] | None = None,
) -> dict[str, Metric]:
    """Return metrics of the probability ratios ρ to the older policy, by name.

    The metrics are the mean and maximum of ρ, the KL as the mean of ρ − 1 − log ρ (k3), and for each bound the share of
    clipped tokens.

    Args:
        mask_T: the response mask, bool [T]; tokens with False don't count.
        log_ratio_T: the tokens' log-ratios, float [T]; this function clamps them to ±20.
        ratio_T: the ratio that the loss uses if it is not the token's but its sequence's, float [T]; mean and maximum are over this
            ratio.
        upper_T: the tokens whose gradient was removed, or whose weight was clipped, by an upper bound: bool [T], False on masked tokens.
            None if the loss has no upper bound.
        lower_T: the same for a lower bound.
    """
    log_ratio_T = log_ratio_T.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    token_ratio_T = log_ratio_T.exp()
    # Subtract token by token: the rounding error of a difference of sums can exceed the KL.
    kl_T = token_ratio_T - log_ratio_T - 1
    used_T = (token_ratio_T if ratio_T is None else ratio_T.detach()) * mask_T
    largest = used_T.amax() if len(used_T) else used_T.sum()
    tokens = mask_T.count_nonzero()
    upper_T, lower_T = (
        torch.zeros_like(mask_T) if cut_T is None else cut_T for cut_T in (upper_T, lower_T)
    )
    return {
        "actor/ratio_mean": mean_metric(used_T, mask_T, tokens),
        "actor/ratio_max": Max(cast("float", largest)),
        "actor/approx_kl": mean_metric(kl_T, mask_T, tokens),
        "actor/clip_frac": share_metric(upper_T | lower_T, tokens),
        "actor/clip_frac_upper": share_metric(upper_T, tokens),
        "actor/clip_frac_lower": share_metric(lower_T, tokens),
    }
