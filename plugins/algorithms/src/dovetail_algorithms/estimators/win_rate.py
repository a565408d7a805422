"""WinRate: a sample's rate of wins against the samples of its group (SPPO, arXiv 2405.00675)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from dovetail.interfaces import Groups
from dovetail_algorithms.config.estimators import WinRateConfig
from dovetail_algorithms.estimators.group_baseline import ScoreBaseline


class WinRateEstimator(ScoreBaseline):
    """A_i = P̂(y_i ≻ π | x) − ½,  P̂(y_i ≻ π | x) = 1/n Σ_j P(y_i ≻ y_j | x), over the n samples of one prompt (arXiv 2405.00675).

    P is 1 if y_i has the higher score, ½ if both scores are equal, else 0; with `comparison: bradley_terry`, it is σ(r_i − r_j). y_i
    are the responses to prompt x, and π is the policy. A sample ties with itself. Advantages are between −½ and ½, and 0 in a group of
    one; they are the target of the objective `sppo`.
    """

    name = "win_rate"
    Config = WinRateConfig

    def relative(
        self, scores_N: Float64[np.ndarray, "N"], groups: Groups
    ) -> Float64[np.ndarray, "N"]:
        weights_N = groups.weights_N
        weights_N = np.ones_like(scores_N) if weights_N is None else weights_N
        order_N = np.argsort(groups.index_N, kind="stable")
        ends_G = np.cumsum(np.bincount(groups.index_N, minlength=groups.count))
        relative_N = np.zeros_like(scores_N)
        for rows_S in np.split(order_N, ends_G[:-1]):
            ahead_SS = scores_N[rows_S, None] - scores_N[None, rows_S]
            # σ(d) − ½ = ½ tanh(d/2), which does not overflow.
            wins = self.config.comparison == "wins"
            above_SS = np.sign(ahead_SS) / 2 if wins else np.tanh(ahead_SS / 2) / 2
            total = weights_N[rows_S].sum()
            relative_N[rows_S] = above_SS @ weights_N[rows_S] / (total or 1.0)
        return relative_N
