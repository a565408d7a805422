"""Sums along packed responses, and whitening: compiled by numba where it is installed, else in NumPy. Same results.

`pip install dovetail-algorithms[compiled]` installs numba. T tokens, N samples.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int64, Real

from dovetail.interfaces import Reduction
from dovetail.numerics import EPSILON, ROUNDING
from dovetail_algorithms.estimators import scans_eager


@functools.cache
def compiled() -> Any:
    """The module of compiled scans; None where numba is not installed, or does not go with this NumPy."""
    try:
        from dovetail_algorithms.estimators import scans_compiled
    except ImportError:
        return None
    return scans_compiled


def _scans() -> ModuleType:
    return compiled() or scans_eager


def discounted_returns(
    rewards_T: Real[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    offsets_N1: Int64[np.ndarray, "N1"],
    gamma: float,
) -> Float32[np.ndarray, "T"]:
    """G_t = R_t + γ G_{t+1} over the tokens with mask 1; tokens with mask 0 take no time.

    Args:
        rewards_T: [T], packed end to end; rewards on tokens with mask 0 are ignored.
        mask_T: bool [T].
        offsets_N1: int64 [N + 1], where each sample begins.
        gamma: in [0, 1].

    Returns:
        float32 [T], added up in float64; 0 where the mask is False.
    """
    rewards_T = np.asarray(rewards_T, np.float32)
    returns_T: np.ndarray = _scans().discounted_returns(rewards_T, mask_T, offsets_N1, float(gamma))
    return returns_T


def gae(
    rewards_T: Real[np.ndarray, "T"],
    values_T: Real[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    offsets_N1: Int64[np.ndarray, "N1"],
    gamma: float,
    lam: float,
) -> tuple[Float32[np.ndarray, "T"], Float32[np.ndarray, "T"]]:
    """A_t = δ_t + γλ A_{t+1} with δ_t = R_t + γ V_{t+1} − V_t, over the tokens with mask 1 (arXiv 1506.02438).

    Args:
        rewards_T: [T], packed end to end.
        values_T: [T], V at each token; V after a sample's last token is 0.
        mask_T: bool [T]; what other tokens hold is ignored.
        offsets_N1: int64 [N + 1], where each sample begins.
        gamma: in [0, 1].
        lam: in [0, 1].

    Returns:
        A and A + V, float32 [T] each, added up in float64; 0 where the mask is False.
    """
    rewards_T, values_T = np.asarray(rewards_T, np.float32), np.asarray(values_T, np.float32)
    pair: tuple[np.ndarray, np.ndarray] = _scans().gae(
        rewards_T, values_T, mask_T, offsets_N1, float(gamma), float(lam)
    )
    return pair


def rewards_to_go(
    rewards_T: Real[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    offsets_N1: Int64[np.ndarray, "N1"],
    baseline_N: Real[np.ndarray, "N"],
) -> tuple[Float32[np.ndarray, "T"], Float32[np.ndarray, "T"]]:
    """G_t = Σ_{s≥t} R_s over the tokens with mask 1, and G_t − b.

    Args:
        rewards_T: [T], packed end to end; rewards on tokens with mask 0 are ignored.
        mask_T: bool [T].
        offsets_N1: int64 [N + 1], where each sample begins.
        baseline_N: [N], b of each sample.

    Returns:
        G − b and G, float32 [T] each, added up in float64; 0 where the mask is False.
    """
    rewards_T, baseline_N = np.asarray(rewards_T, np.float32), np.asarray(baseline_N, np.float32)
    pair: tuple[np.ndarray, np.ndarray] = _scans().rewards_to_go(
        rewards_T, mask_T, offsets_N1, baseline_N
    )
    return pair


def whiten(
    values_T: Float32[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    reduction: Reduction,
    *,
    in_place: bool = False,
) -> Float32[np.ndarray, "T"]:
    """(x − mean) / √(variance + 1e-8) over what the mask selects, as `dovetail.numerics.whiten`, on several threads.

    Args:
        values_T: float32 [T].
        mask_T: bool [T].
        reduction: sums over the ranks that hold the other parts of the batch.
        in_place: overwrite the values.

    Returns:
        float32 [T]; 0 where the mask is False.
    """
    own_count, own_mean, own_squares = _merged(_scans().moments(values_T, mask_T))
    total = reduction.sum(np.array([own_count, own_count * own_mean], np.float64))
    count, mean = float(total[0]), float(total[1]) / max(float(total[0]), 1.0)
    squares = own_squares + own_count * (own_mean - mean) ** 2
    if count:
        squares = float(reduction.sum(np.array([squares], np.float64))[0])
    var = squares / (count - 1) if count > 1 else 0.0
    # The mean of equal values is off by a rounding error, which is no signal.
    equal = math.sqrt(var) <= ROUNDING * abs(mean)
    out_T = values_T if in_place else np.empty_like(values_T)
    factor = 0.0 if equal else 1 / math.sqrt(var + EPSILON)
    _scans().standardise(values_T, mask_T, mean, factor, out_T)
    return out_T


def _merged(parts: np.ndarray) -> tuple[float, float, float]:
    """Count, mean, and squared deviations from it of all parts together, from those of each."""
    count = mean = squares = 0.0
    for own_count, own_mean, own_squares in parts.tolist():
        if own_count:
            shift, both = own_mean - mean, count + own_count
            squares += own_squares + shift * shift * count * own_count / both
            mean += shift * own_count / both
            count = both
    return count, mean, squares
