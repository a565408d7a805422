"""Advantages over a baseline for every position: compiled by numba where it is installed, else in NumPy.

T tokens, N samples sorted by group, G groups.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from dovetail_algorithms.estimators import baselines_eager, scans


def optimal_baseline(
    rewards_T: Float32[np.ndarray, "T"],
    energies_T: Float32[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    offsets_N1: Int64[np.ndarray, "N1"],
    bounds_G1: Int64[np.ndarray, "G1"],
    weights_N: Float64[np.ndarray, "N"],
    second_G: Int64[np.ndarray, "G"],
    *,
    compact: bool,
) -> tuple[Float32[np.ndarray, "T"], Float32[np.ndarray, "T"]]:
    """G_t − B_t with B_t = Σ_j G_jt W_jt / (Σ_j W_jt + 1e-8) over the group, W the running sum of energies.

    Args:
        rewards_T: float32 [T], packed end to end.
        energies_T: float32 [T], of each token.
        mask_T: bool [T]; tokens with mask 0 count in no sum.
        offsets_N1: int64 [N + 1], where each sample begins.
        bounds_G1: int64 [G + 1], the first sample of each group.
        weights_N: float64 [N], how much each sample counts.
        second_G: int64 [G]; from this position on the baseline is 0.
        compact: count positions among the tokens with mask 1 only.

    Returns:
        Advantages and returns G, float32 [T] each, added up in float64; 0 where the mask is False.
    """
    if scans.compiled() is None:
        return baselines_eager.optimal_baseline(
            rewards_T,
            energies_T,
            mask_T,
            offsets_N1,
            bounds_G1,
            weights_N,
            second_G,
            compact=compact,
        )
    from dovetail_algorithms.estimators import baselines_compiled

    pair: tuple[np.ndarray, np.ndarray] = baselines_compiled.optimal_baseline(
        rewards_T, energies_T, mask_T, offsets_N1, bounds_G1, weights_N, second_G, compact=compact
    )
    return pair
