"""The probability ratio of the policy to an older one, the loss that PPO makes of it, and the metrics of both.

Nothing here carries a gradient: a loss works out its values and its slopes dL/d log π, and `with_slopes` joins them. That
keeps autograd's masking, the slowest operations of a processor's, out of the way, and shows where the gradient goes.
Masked tokens hold 0 in all that a loss reads, hence log-ratio 0 and advantage 0 here. T tokens, N samples.
"""

from __future__ import annotations

import math
from typing import cast

import attrs
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dovetail.metrics import Max, Mean, Metric
from dovetail.numerics import sum_by_sample

LOG_RATIO_BOUND = 20.0
"""The log-ratio is kept within ± this, so that exp does not overflow."""
RATIO_BOUND = math.exp(LOG_RATIO_BOUND) * (1 - 1e-6)
"""From here on the clamp of the log-ratio takes the gradient away, so that one broken token can't outweigh a batch."""


def with_slopes(
    values_T: Float[Tensor, "T"], slopes_T: Float[Tensor, "T"], log_probs_T: Float[Tensor, "T"]
) -> Float[Tensor, "T"]:
    """Losses with these values and, by `log_probs_T`, these derivatives: float [T]."""
    return torch.addcmul(values_T, slopes_T, log_probs_T - log_probs_T.detach())


def as_numbers(chosen_T: Bool[Tensor, "T"], like_T: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """1 where True and 0 elsewhere, in the dtype of `like_T`, float [T]."""
    # By way of uint8, from which a processor converts four times as fast as from bool.
    return chosen_T.view(torch.uint8).to(like_T.dtype)


def log_ratio(
    log_probs_T: Float[Tensor, "T"], old_log_probs_T: Float[Tensor, "T"]
) -> Float[Tensor, "T"]:
    """The log-ratio without gradient, float [T]: clamp(log_probs − old_log_probs, ±20)."""
    difference_T = log_probs_T.detach() - old_log_probs_T
    return difference_T.clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def sequence_ratio(
    log_ratio_T: Float[Tensor, "T"], weights_T: Float[Tensor, "T"], offsets_N1: Int64[Tensor, "N1"]
) -> Float[Tensor, "T"]:
    """exp(min(mean of the sequence's log-ratios, 20)) at each token, of the log-ratios' dtype: float [T].

    The mean is of the log-ratios as they are; only its own exponent is bounded, and from above alone, so that exp does
    not overflow.

    Args:
        log_ratio_T: float [T], not clamped, 0 where the mask is False.
        weights_T: float [T], 1 where the mask is True, else 0.
        offsets_N1: int64 [N + 1], where each sample begins.
    """
    counts_N = sum_by_sample(weights_T, offsets_N1).clamp_(min=1)
    # In float64, because in a float32 sum with one large log-ratio the small ones lose their last digits.
    means_N = sum_by_sample(log_ratio_T.double(), offsets_N1) / counts_N
    ratio_N = means_N.clamp_(max=LOG_RATIO_BOUND).exp_().to(log_ratio_T.dtype)
    return ratio_N.repeat_interleave(offsets_N1.diff(), output_size=log_ratio_T.shape[0])


@attrs.frozen(kw_only=True, eq=False)
class Surrogate:
    """PPO's loss of each token.

    Attributes:
        values_T: float [T].
        slopes_T: float [T], by the log-ratio: 0 where a bound holds.
        upper_T: bool [T], True where the advantage is positive and the ratio above its bound.
        lower_T: bool [T], True where the advantage is negative and the ratio below its bound.
        capped_T: bool [T], True where the advantage is negative and the ratio above the cap.
    """

    values_T: Float[Tensor, "T"]
    slopes_T: Float[Tensor, "T"]
    upper_T: Bool[Tensor, "T"]
    lower_T: Bool[Tensor, "T"]
    capped_T: Bool[Tensor, "T"]


def clipped_surrogate(
    ratio_T: Float[Tensor, "T"],
    advantages_T: Float[Tensor, "T"],
    *,
    clip_low: float,
    clip_high: float,
    cap: float = RATIO_BOUND,
) -> Surrogate:
    """max(−Aρ, −A clip(ρ, 1 − clip_low, 1 + clip_high)), and where A < 0 at most −A · cap.

    Args:
        ratio_T: float [T].
        advantages_T: float [T].
        clip_low: how far below 1 the ratio may fall where the advantage is negative.
        clip_high: how far above 1 it may rise where the advantage is positive.
        cap: greatest ratio where the advantage is negative (dual clip).
    """
    costs_T = -advantages_T
    plain_T = costs_T * ratio_T
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high).mul_(costs_T)
    clipped_T = torch.maximum(plain_T, clipped_T)
    # Where A ≥ 0 the cap is 0, and the loss not above it.
    values_T = torch.minimum(clipped_T, costs_T.clamp(min=0).mul_(cap))
    bound_T = clipped_T > plain_T
    capped_T = values_T < clipped_T
    free_T = (bound_T | capped_T).logical_not_()
    upper_T = bound_T & (advantages_T > 0)
    return Surrogate(
        values_T=values_T,
        # Of exp(d) the slope by d is itself.
        slopes_T=values_T * as_numbers(free_T, values_T),
        upper_T=upper_T,
        lower_T=bound_T ^ upper_T,
        capped_T=capped_T,
    )


def ratio_metrics(
    ratio_T: Float[Tensor, "T"],
    log_ratio_T: Float[Tensor, "T"],
    weights_T: Float[Tensor, "T"],
    tokens: Int64[Tensor, ""],
    sequence_ratio_T: Float[Tensor, "T"] | None = None,
) -> dict[str, Metric]:
    """Mean and maximum of ρ, and the KL to the older policy by ρ − 1 − log ρ (k3) of the tokens.

    Args:
        ratio_T: float [T], exp of the log-ratio.
        log_ratio_T: float [T], clamped to ±20, 0 where the mask is False.
        weights_T: float [T], 1 where the mask is True, else 0.
        tokens: int [], how many tokens have mask 1.
        sequence_ratio_T: float [T], where the loss uses the sequence's ratio: mean and maximum are of that one.
    """
    # Subtracted token by token: in a difference of sums the KL would drown in their rounding.
    kl_T = (ratio_T - log_ratio_T).sub_(1)
    used_T = (ratio_T if sequence_ratio_T is None else sequence_ratio_T) * weights_T
    largest = used_T.amax() if used_T.numel() else used_T.sum()
    weight = cast("float", tokens)
    return {
        "actor/ratio_mean": Mean(cast("float", used_T.sum()), weight),
        "actor/ratio_max": Max(cast("float", largest)),
        "actor/approx_kl": Mean(cast("float", kl_T.sum()), weight),
    }


def clip_metrics(
    tokens: Int64[Tensor, ""],
    upper_T: Bool[Tensor, "T"] | None = None,
    lower_T: Bool[Tensor, "T"] | None = None,
) -> dict[str, Metric]:
    """Share of tokens whose gradient or weight a bound cut: above, below, and both.

    Args:
        tokens: int [], how many tokens have mask 1.
        upper_T: bool [T], False where the mask is; None where the loss has no upper bound.
        lower_T: bool [T], the same for the lower one.
    """
    upper, lower = (
        tokens.new_zeros(()) if chosen_T is None else chosen_T.count_nonzero()
        for chosen_T in (upper_T, lower_T)
    )
    weight = cast("float", tokens)
    return {
        "actor/clip_frac": Mean(cast("float", upper + lower), weight),
        "actor/clip_frac_upper": Mean(cast("float", upper), weight),
        "actor/clip_frac_lower": Mean(cast("float", lower), weight),
    }
