"""Baselines by position in NumPy: blocks of groups, and in each one sum for every (group, position) pair.

Legend: T tokens, K policy tokens of a block, N samples sorted by group, G groups, P (group, position) pairs of a block.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from dovetail_algorithms.estimators.parts import in_parts
from dovetail_algorithms.estimators.scans_eager import BLOCK, Rooms, backward, own_tokens, put

EPSILON = 1e-8
"""Floor of the weights' sum at a position."""


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
    """As `baselines.optimal_baseline`."""
    advantages_T = np.empty(len(mask_T), np.float32)
    returns_T = np.empty(len(mask_T), np.float32)
    lengths_N = np.diff(offsets_N1)
    rooms = Rooms(offsets_N1[bounds_G1])

    def work(low: int, high: int) -> None:
        first, last = int(bounds_G1[low]), int(bounds_G1[high])
        tokens, kept, ends_1 = own_tokens(mask_T, offsets_N1, first, last)
        counts = np.diff(ends_1)
        starts_K, last_K = ends_1[:-1][counts > 0], ends_1[1:][counts > 0] - 1
        sums_K = rooms.floats(rewards_T[tokens], kept, "sums")
        energy_K = rooms.floats(energies_T[tokens], kept, "energy")
        spare_K = rooms.get("spare", len(sums_K))
        backward(sums_K, last_K, 1.0, spare_K)
        put(sums_K, tokens, kept, returns_T)
        # A running sum is a backward one over the tokens in reverse: there, samples end where they begin.
        backward(energy_K[::-1], len(energy_K) - 1 - starts_K[::-1], 1.0, spare_K)
        weights = weights_N[first:last]
        if np.any(weights != 1):
            energy_K *= np.repeat(weights, counts)

        sizes = np.diff(bounds_G1[low : high + 1])
        group = np.repeat(np.arange(high - low), sizes)
        reach = np.zeros(high - low, np.int64)
        np.maximum.at(reach, group, lengths_N[first:last])
        base = np.cumsum(reach) - reach
        begin = ends_1[:-1] if compact or kept is None else offsets_N1[first:last] - tokens.start
        pair_K = np.repeat(base[group] - begin, counts)
        pair_K += np.arange(len(pair_K)) if compact or kept is None else np.flatnonzero(kept)
        baseline_P = _weighted_mean(pair_K, sums_K, energy_K, spare_K, int(reach.sum()))
        position_P = np.arange(len(baseline_P)) - np.repeat(base, reach)
        baseline_P[position_P >= np.repeat(second_G[low:high], reach)] = 0
        sums_K -= baseline_P.take(pair_K, out=spare_K, mode="clip")
        put(sums_K, tokens, kept, advantages_T)

    in_parts(offsets_N1[bounds_G1], BLOCK, work)
    return advantages_T, returns_T


def _weighted_mean(
    pair_K: np.ndarray, values_K: np.ndarray, weight_K: np.ndarray, spare_K: np.ndarray, pairs: int
) -> Float64[np.ndarray, "P"]:
    """float64 [P]: Σ value · weight / (Σ weight + 1e-8) of each pair."""
    weighted_K = np.multiply(values_K, weight_K, out=spare_K)
    total_P = np.bincount(pair_K, weights=weighted_K, minlength=pairs).astype(np.float64)
    total_P /= np.bincount(pair_K, weights=weight_K, minlength=pairs) + EPSILON
    return total_P
