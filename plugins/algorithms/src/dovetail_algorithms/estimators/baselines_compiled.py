"""Baselines by position compiled by numba, out of the kernels of `scans_compiled`. Imported only where numba is.

Legend: T tokens, N samples sorted by group, G groups.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from dovetail_algorithms.estimators.parts import in_parts
from dovetail_algorithms.estimators.scans_compiled import (
    PART,
    keep,
    kernel,
    longest,
    recur,
    scatter,
    take,
)

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
    """As `scans.optimal_baseline`."""
    advantages_T = np.empty(len(mask_T), np.float32)
    returns_T = np.empty(len(mask_T), np.float32)
    in_parts(
        offsets_N1[bounds_G1],
        PART,
        lambda low, high: _optimal_baseline(
            rewards_T, energies_T, mask_T, offsets_N1, bounds_G1, weights_N, second_G, compact,
            low, high, advantages_T, returns_T,
        ),
    )  # fmt: skip
    return advantages_T, returns_T


@kernel
@no_type_check
def _optimal_baseline(
    rewards, energies, mask, offsets, bounds, weights, second, compact, low, high,
    advantages, returns,
):  # fmt: skip
    widest = longest(offsets, bounds[low], bounds[high])
    x, w, index = np.empty(widest + 1), np.empty(widest + 1), np.empty(widest + 1, np.int32)
    total, weight = np.empty(widest), np.empty(widest)
    for group in range(low, high):
        first, last = bounds[group], bounds[group + 1]
        reach = longest(offsets, first, last)
        total[:reach] = 0.0
        weight[:reach] = 0.0
        for row in range(first, last):
            start, end = offsets[row], offsets[row + 1]
            kept = keep(mask[start:end], rewards[start:end], x, index)
            take(energies[start:end], index, kept, w)
            recur(x, kept, 1.0)
            scatter(x, index, kept, returns[start:end])
            _running(w, kept, weights[row])
            _add_up(x, w, index, kept, compact or kept == end - start, total, weight)
        for at in range(reach):
            total[at] = total[at] / (weight[at] + EPSILON) if at < second[group] else 0.0
        for row in range(first, last):
            start, end = offsets[row], offsets[row + 1]
            kept = keep(mask[start:end], returns[start:end], x, index)
            _subtract(x, index, kept, compact or kept == end - start, total)
            scatter(x, index, kept, advantages[start:end])


@kernel
@no_type_check
def _add_up(x, w, index, kept, in_order, total, weight):
    if in_order:
        for k in range(kept):
            total[k] += w[k] * x[k]
            weight[k] += w[k]
        return
    for k in range(kept):
        total[index[k]] += w[k] * x[k]
        weight[index[k]] += w[k]


@kernel
@no_type_check
def _subtract(x, index, kept, in_order, total):
    if in_order:
        for k in range(kept):
            x[k] -= total[k]
        return
    for k in range(kept):
        x[k] -= total[index[k]]


@kernel
@no_type_check
def _running(w, kept, factor):
    """w_k = factor · Σ_{j≤k} w_j."""
    sum_ = 0.0
    for k in range(kept):
        sum_ += w[k]
        w[k] = factor * sum_
