"""Discounted sums along packed samples, without a loop over samples or tokens. T tokens, N samples."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int64, Real


def discounted_returns(
    rewards_T: Real[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    offsets_N1: Int64[np.ndarray, "N1"],
    gamma: float,
) -> Float64[np.ndarray, "T"]:
    """G_t = R_t + γ G_{t+1} over the tokens with mask 1; tokens with mask 0 take no time.

    Computed by doubling: after step k every token holds the discounted sum of its next 2^k rewards, so that
    log2 of the longest response passes are enough. Powers of γ only ever shrink; nothing is divided by them.

    Args:
        rewards_T: [T], packed end to end; rewards on tokens with mask 0 are ignored.
        mask_T: bool [T].
        offsets_N1: int64 [N + 1], where each sample begins.
        gamma: in [0, 1].

    Returns:
        float64 [T]; 0 where the mask is False.
    """
    kept = np.flatnonzero(mask_T)
    # Among the kept tokens only: where the token's sample ends.
    before_T1 = np.concatenate([[0], np.cumsum(mask_T)])
    ends_N = before_T1[offsets_N1[1:]]
    end_K = np.repeat(ends_N, np.diff(before_T1[offsets_N1]))
    index_K = np.arange(len(kept))
    sums_K = rewards_T[kept].astype(np.float64)
    reach, discount = 1, float(gamma)
    longest = int((end_K - index_K).max(initial=0))
    while reach < longest and discount > 0:
        later_K = np.zeros_like(sums_K)
        later_K[:-reach] = sums_K[reach:]
        sums_K = sums_K + discount * np.where(index_K + reach < end_K, later_K, 0.0)
        reach, discount = 2 * reach, discount * discount
    returns_T = np.zeros(len(mask_T), np.float64)
    returns_T[kept] = sums_K
    return returns_T
