"""How many tokens of a response are the policy's own. T tokens, N samples."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from dovetail.batch import Ragged


def policy_lengths(mask: Ragged) -> Int64[np.ndarray, "N"]:
    """int64 [N]: tokens with mask 1 in each row of the ragged bool column."""
    before_T1 = np.zeros(len(mask.values) + 1, np.int64)
    np.cumsum(mask.values, out=before_T1[1:])
    lengths_N: np.ndarray = np.diff(before_T1[mask.offsets])
    return lengths_N
