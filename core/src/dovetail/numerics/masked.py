"""Statistics over the tokens that count: means, variances, whitening. NumPy; T tokens, packed.

What the mask leaves out has no influence, whatever it holds: NaN and infinity included.
"""

from __future__ import annotations

import attrs
import numpy as np
from jaxtyping import Bool, Float32, Real

from dovetail.interfaces.plugin import LocalReduction, Reduction

EPSILON = 1e-8
"""Floor of the variance in whitening."""
ROUNDING = 1e-12
"""Relative to the mean: a smaller deviation is the mean's own rounding error."""


@attrs.frozen
class Moments:
    """Count, mean and unbiased variance of what a mask selects, over all ranks that share the batch."""

    count: float
    mean: float
    """0 where nothing is selected."""
    var: float
    """Unbiased; 0 where fewer than two values are selected."""


def masked_moments(
    values_T: Real[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    reduction: Reduction | None = None,
) -> Moments:
    """Mean and variance of the values that the mask selects, in float64.

    The variance is computed from deviations in a second pass, so that a large mean costs no precision.

    Args:
        values_T: [T], any real dtype.
        mask_T: bool [T].
        reduction: sums over the ranks that hold the other parts of the batch; by default there are none.
    """
    total = reduction or LocalReduction()
    chosen = values_T[mask_T].astype(np.float64, copy=False)
    count, sum_ = total.sum(np.array([chosen.size, chosen.sum()], np.float64)).tolist()
    if not count:
        return Moments(0.0, 0.0, 0.0)
    mean = sum_ / count
    squares = float(total.sum(np.array([np.square(chosen - mean).sum()], np.float64))[0])
    return Moments(count, mean, squares / (count - 1) if count > 1 else 0.0)


def masked_mean(
    values_T: Real[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    reduction: Reduction | None = None,
) -> float:
    """Mean of the values that the mask selects; 0 where it selects none. Arguments as in `masked_moments`."""
    return masked_moments(values_T, mask_T, reduction).mean


def masked_var(
    values_T: Real[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    reduction: Reduction | None = None,
) -> float:
    """Unbiased variance of the values that the mask selects; 0 for fewer than two. Arguments as in `masked_moments`."""
    return masked_moments(values_T, mask_T, reduction).var


def whiten(
    values_T: Real[np.ndarray, "T"],
    mask_T: Bool[np.ndarray, "T"],
    reduction: Reduction | None = None,
    *,
    shift_mean: bool = True,
) -> Float32[np.ndarray, "T"]:
    """(x − mean) / √(variance + 1e-8) over what the mask selects.

    Args:
        values_T: [T], any real dtype.
        mask_T: bool [T].
        reduction: as in `masked_moments`.
        shift_mean: False scales only, and leaves the mean where it was.

    Returns:
        float32 [T]; 0 where the mask is False.
    """
    moments = masked_moments(values_T, mask_T, reduction)
    white_T = np.zeros(values_T.shape, np.float32)
    deviations = values_T[mask_T].astype(np.float64) - moments.mean
    # The mean of equal values is off by a rounding error, which is no signal.
    deviations[np.abs(deviations) <= ROUNDING * abs(moments.mean)] = 0
    scaled = deviations / np.sqrt(moments.var + EPSILON)
    white_T[mask_T] = scaled if shift_mean else scaled + moments.mean
    return white_T
