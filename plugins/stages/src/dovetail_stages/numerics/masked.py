"""Statistics over the tokens that count: means, variances, whitening. NumPy; T tokens, packed.

Values outside of the mask have no influence, even NaN and infinity.
"""

from __future__ import annotations

import math

import attrs
import numpy as np
from jaxtyping import Bool, Float32, Real

from dovetail.interfaces import LocalReduction, Reduction

EPSILON = 1e-8
"""Number added to the variance in whitening."""
ROUNDING = 1e-12
"""If the standard deviation is at most this share of the mean, whitening treats the values as equal: the rest is rounding error."""


@attrs.frozen
class Moments:
    """Sum of the weights (`count`), weighted mean and unbiased variance of values, over all ranks that share the batch."""

    count: float
    mean: float
    """Mean; 0 if all weights are 0."""
    var: float
    """Unbiased variance; 0 if the sum of the weights is at most 1."""


def weighted_moments(
    values_N: Real[np.ndarray, "N"],
    weights_N: Real[np.ndarray, "N"] | Bool[np.ndarray, "N"],
    reduction: Reduction | None = None,
) -> Moments:
    """Return the mean and variance of values, weighted by how often each counts, in float64.

    To get the moments over tokens from one advantage for each sample, weight each sample by its number of tokens. The variance is
    computed from deviations in a second pass, so that a large mean costs no precision.

    Args:
        values_N: [N], any real dtype; values of weight 0 may be anything.
        weights_N: [N], counts of at least 0, or a mask.
        reduction: the sum over the ranks that share the batch; by default this rank alone.
    """
    total = reduction or LocalReduction()
    counted = weights_N > 0
    chosen = values_N[counted].astype(np.float64, copy=False)
    weights = weights_N[counted].astype(np.float64, copy=False)
    sums = np.array([weights.sum(), (weights * chosen).sum()], np.float64)
    count, sum_ = total.sum(sums).tolist()
    if not count:
        return Moments(0.0, 0.0, 0.0)
    mean = sum_ / count
    own = np.array([(weights * np.square(chosen - mean)).sum()], np.float64)
    squares = float(total.sum(own)[0])
    return Moments(count, mean, squares / (count - 1) if count > 1 else 0.0)


def whiten(
    values_N: Real[np.ndarray, "N"],
    weights_N: Real[np.ndarray, "N"] | Bool[np.ndarray, "N"],
    reduction: Reduction | None = None,
) -> Float32[np.ndarray, "N"]:
    """Compute (x − mean) / √(variance + 1e-8); arguments and moments are those of `weighted_moments`.

    Returns:
        float32 [N]; 0 where the weight is 0.
    """
    moments = weighted_moments(values_N, weights_N, reduction)
    white_N = np.zeros(values_N.shape, np.float32)
    # Equal values differ from their mean by a rounding error, which must not be scaled up.
    if not math.sqrt(moments.var) <= ROUNDING * abs(moments.mean):
        counted = weights_N > 0
        deviations = values_N[counted].astype(np.float64) - moments.mean
        white_N[counted] = deviations / math.sqrt(moments.var + EPSILON)
    return white_N
