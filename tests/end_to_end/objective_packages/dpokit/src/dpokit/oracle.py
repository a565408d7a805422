"""The loss and its gradient by the paper's formula, pair by pair, in NumPy and float64."""

from __future__ import annotations

import numpy as np

from dovetail.batch import Batch


def dpo(batch: Batch, log_probs_T: np.ndarray, beta: float) -> tuple[float, np.ndarray]:
    """Return the loss, and its gradient by the log-probabilities, float64 [T]."""
    mask, ref_T = batch["response_mask"], batch["ref_log_probs"].values.astype(np.float64)
    chosen_N, pair_N = batch["chosen"], batch["pair_id"]
    away_T = np.where(mask.values, log_probs_T.astype(np.float64) - ref_T, 0)
    rewards_N = [float(row.sum()) for row in mask.with_values(away_T)]
    loss, slopes_N, pairs = 0.0, np.zeros(len(mask)), len(mask) // 2
    for pair in set(pair_N.tolist()):
        (better,) = np.flatnonzero((pair_N == pair) & chosen_N)
        (worse,) = np.flatnonzero((pair_N == pair) & ~chosen_N)
        margin = beta * (rewards_N[better] - rewards_N[worse])
        loss += np.log1p(np.exp(-margin)) / pairs
        slopes_N[better] = -beta / (1 + np.exp(margin)) / pairs
        slopes_N[worse] = -slopes_N[better]
    return loss, np.where(mask.values, np.repeat(slopes_N, mask.lengths), 0)
