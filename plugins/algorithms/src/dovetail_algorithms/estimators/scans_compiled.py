"""The scans of `scans` compiled by numba: one pass over each response, in cache. Imported only where numba is.

Kernels release the interpreter's lock, and run on several threads over parts of the batch. The parts do not depend on
the number of threads, so that neither do the results.

Legend: T tokens, K policy tokens of one response, N samples. Kernels see one response as slices, whose indices numba
knows to be in range: that is what lets it vectorise them.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, no_type_check

import numba  # type: ignore[import-untyped, import-not-found, unused-ignore]
import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from dovetail_algorithms.estimators.parts import in_parts, in_threads

PART = 1 << 18
"""Tokens of a part of the batch: much work for one thread, and enough parts for many."""


def _compiled(**options: Any) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        try:
            return numba.njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # there is no directory to cache in
            return numba.njit(nogil=True, **options)(function)

    return decorate


kernel = _compiled()
sum_kernel = _compiled(fastmath={"reassoc", "contract"})
"""For sums whose order is free."""


def gae(
    rewards_T: Float32[np.ndarray, "T"],
    values_T: Float32[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    offsets_N1: Int64[np.ndarray, "N1"],
    gamma: float,
    lam: float,
) -> tuple[Float32[np.ndarray, "T"], Float32[np.ndarray, "T"]]:
    """As `scans.gae`."""
    advantages_T = np.empty(len(mask_T), np.float32)
    returns_T = np.empty(len(mask_T), np.float32)
    in_parts(
        offsets_N1,
        PART,
        lambda low, high: _gae(
            rewards_T, values_T, mask_T, offsets_N1, low, high,
            gamma, gamma * lam, advantages_T, returns_T,
        ),
    )  # fmt: skip
    return advantages_T, returns_T


def discounted_returns(
    rewards_T: Float32[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    offsets_N1: Int64[np.ndarray, "N1"],
    gamma: float,
) -> Float32[np.ndarray, "T"]:
    """As `scans.discounted_returns`."""
    returns_T = np.empty(len(mask_T), np.float32)
    in_parts(
        offsets_N1,
        PART,
        lambda low, high: _discounted(rewards_T, mask_T, offsets_N1, low, high, gamma, returns_T),
    )
    return returns_T


def rewards_to_go(
    rewards_T: Float32[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    offsets_N1: Int64[np.ndarray, "N1"],
    baseline_N: Float32[np.ndarray, "N"],
) -> tuple[Float32[np.ndarray, "T"], Float32[np.ndarray, "T"]]:
    """As `scans.rewards_to_go`."""
    advantages_T = np.empty(len(mask_T), np.float32)
    returns_T = np.empty(len(mask_T), np.float32)
    in_parts(
        offsets_N1,
        PART,
        lambda low, high: _to_go(
            rewards_T, mask_T, offsets_N1, low, high, baseline_N, advantages_T, returns_T
        ),
    )
    return advantages_T, returns_T


def moments(
    values_T: Float32[np.ndarray, "T"], mask_T: Bool[np.ndarray, "T"]
) -> Float64[np.ndarray, "parts 3"]:
    """Count, mean, and sum of squared deviations from it, of what the mask selects in each part: float64 [parts, 3]."""
    starts = range(0, len(mask_T), PART)
    parts = np.zeros((len(starts), 3))

    def work(part: int) -> None:
        block = slice(starts[part], starts[part] + PART)
        _moments(values_T[block], mask_T[block], parts[part])

    in_threads(len(starts), work)
    return parts


def standardise(
    values_T: Float32[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    mean: float,
    factor: float,
    out_T: Float32[np.ndarray, "T"],
) -> None:
    """Write (x − mean) · factor, and 0 where the mask is False. `out_T` may be `values_T`."""
    starts = range(0, len(mask_T), PART)

    def work(part: int) -> None:
        block = slice(starts[part], starts[part] + PART)
        _standardise(values_T[block], mask_T[block], mean, factor, out_T[block])

    in_threads(len(starts), work)


@kernel
@no_type_check
def _gae(rewards, values, mask, offsets, low, high, gamma, decay, advantages, returns):
    widest = longest(offsets, low, high)
    x, v, index = np.empty(widest + 1), np.empty(widest + 1), np.empty(widest + 1, np.int32)
    for row in range(low, high):
        start, end = offsets[row], offsets[row + 1]
        kept = keep(mask[start:end], rewards[start:end], x, index)
        take(values[start:end], index, kept, v)
        v[kept] = 0.0
        _differences(x, v, gamma, kept)
        recur(x, kept, decay)
        scatter(x, index, kept, advantages[start:end])
        _add(x, v, kept)
        scatter(x, index, kept, returns[start:end])


@kernel
@no_type_check
def _discounted(rewards, mask, offsets, low, high, gamma, returns):
    widest = longest(offsets, low, high)
    x, index = np.empty(widest + 1), np.empty(widest + 1, np.int32)
    for row in range(low, high):
        start, end = offsets[row], offsets[row + 1]
        kept = keep(mask[start:end], rewards[start:end], x, index)
        recur(x, kept, gamma)
        scatter(x, index, kept, returns[start:end])


@kernel
@no_type_check
def _to_go(rewards, mask, offsets, low, high, baseline, advantages, returns):
    widest = longest(offsets, low, high)
    x, index = np.empty(widest + 1), np.empty(widest + 1, np.int32)
    for row in range(low, high):
        start, end = offsets[row], offsets[row + 1]
        kept = keep(mask[start:end], rewards[start:end], x, index)
        recur(x, kept, 1.0)
        scatter(x, index, kept, returns[start:end])
        for k in range(kept):
            x[k] -= baseline[row]
        scatter(x, index, kept, advantages[start:end])


@kernel
@no_type_check
def longest(offsets, low, high):
    """Tokens of the longest row in low … high − 1; at least 1."""
    widest = 1
    for row in range(low, high):
        widest = max(widest, offsets[row + 1] - offsets[row])
    return widest


@kernel
@no_type_check
def keep(mask, values, x, index):
    """Values of the kept tokens to the front of x, their positions to index; returns how many there are.

    Where all are kept, the index is left as it was: nothing looks at it.
    """
    kept = 0
    for t in range(len(mask)):
        kept += mask[t]
    if kept == len(mask):
        for t in range(len(mask)):
            x[t] = values[t]
        return kept
    # Without a branch: what is not kept is overwritten by the next.
    place = 0
    for t in range(len(mask)):
        x[place] = values[t]
        index[place] = t
        place += mask[t]
    return kept


@kernel
@no_type_check
def take(values, index, kept, x):
    """Values of the kept tokens to the front of x."""
    if kept == len(values):
        for t in range(len(values)):
            x[t] = values[t]
        return
    for k in range(kept):
        x[k] = values[index[k]]


@kernel
@no_type_check
def scatter(x, index, kept, out):
    """The kept values where they belong, and 0 between them."""
    if kept == len(out):
        for t in range(len(out)):
            out[t] = x[t]
        return
    for t in range(len(out)):
        out[t] = 0
    for k in range(kept):
        out[index[k]] = x[k]


@kernel
@no_type_check
def _differences(x, v, gamma, kept):
    for k in range(kept):
        x[k] += gamma * v[k + 1] - v[k]


@kernel
@no_type_check
def _add(x, v, kept):
    for k in range(kept):
        x[k] += v[k]


@kernel
@no_type_check
def recur(x, kept, decay):
    """x_k += decay · x_{k+1}, from the end: four steps of the chain at a time, so that it is a quarter as long."""
    decay2 = decay * decay
    decay3, decay4 = decay2 * decay, decay2 * decay2
    later, k = 0.0, kept
    while k >= 4:
        x3 = x[k - 1]
        x2 = x[k - 2] + decay * x3
        x1 = x[k - 3] + decay * x2
        x0 = x[k - 4] + decay * x1
        x[k - 1] = x3 + decay * later
        x[k - 2] = x2 + decay2 * later
        x[k - 3] = x1 + decay3 * later
        later = x0 + decay4 * later
        x[k - 4] = later
        k -= 4
    while k > 0:
        later = x[k - 1] + decay * later
        x[k - 1] = later
        k -= 1


@sum_kernel
@no_type_check
def _moments(values, mask, out):
    """Count, mean, and sum of squared deviations from it, in two passes."""
    count, total = 0, 0.0
    for t in range(len(mask)):
        count += mask[t]
        total += np.float64(values[t]) if mask[t] else 0.0
    mean = total / count if count else 0.0
    squares = 0.0
    for t in range(len(mask)):
        deviation = np.float64(values[t]) - mean if mask[t] else 0.0
        squares += deviation * deviation
    out[0], out[1], out[2] = count, mean, squares


@kernel
@no_type_check
def _standardise(values, mask, mean, factor, out):
    for t in range(len(mask)):
        out[t] = (values[t] - mean) * factor if mask[t] else 0.0
