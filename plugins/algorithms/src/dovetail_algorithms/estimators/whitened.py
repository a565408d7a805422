"""Whitening of sample-level advantages over the tokens of the batch. N samples."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from dovetail.batch import Ragged
from dovetail.interfaces import Groups, Reduction
from dovetail_stages import whiten


def whiten_over_tokens(
    advantages_N: Float64[np.ndarray, "N"], mask: Ragged, groups: Groups, reduction: Reduction
) -> Float64[np.ndarray, "N"]:
    """Compute (x − mean) / √(variance + 1e-8), with each sample weighted by its number of policy tokens.

    Groups of one trajectory take no part and stay 0, so that failed samples don't become a signal.

    Args:
        advantages_N: float64 [N], 0 in groups of one.
        mask: ragged bool, `response_mask`.
        groups: the groups of the samples.
        reduction: computes sums over the ranks that hold the other groups of the batch.

    Returns:
        float64 [N]; 0 for groups of one and samples without a token of the policy.
    """
    compared_N = (groups.sizes_G > 1)[groups.index_N]
    tokens_N = np.where(compared_N, mask.sum(), 0)
    white_N = whiten(advantages_N, tokens_N, reduction).astype(np.float64)
    return np.where(np.isfinite(advantages_N), white_N, advantages_N)
