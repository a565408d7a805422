"""RLOO: rewards relative to the mean of the group's other samples (arXiv 2402.14740)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from dovetail.interfaces import Groups
from dovetail_algorithms.estimators.group_baseline import ScoreBaseline, deviations


class RlooEstimator(ScoreBaseline):
    """Rewards relative to the mean of the group's other samples.

    A_i = r_i − Σ_{j≠i} r_j / (n − 1), over the n samples of one prompt (arXiv 2402.14740).

    Needs at least two samples a prompt, and no value model. A sample's own reward is not part of its baseline,
    which keeps the gradient unbiased; the result is n / (n − 1) times that of `dr_grpo`.

    Other sequences of a sample's own trajectory don't count as other samples.
    """

    name = "rloo"

    def relative(
        self, scores_N: Float64[np.ndarray, "N"], groups: Groups
    ) -> Float64[np.ndarray, "N"]:
        return leave_one_out(scores_N, groups)


def leave_one_out(values_N: Float64[np.ndarray, "N"], groups: Groups) -> Float64[np.ndarray, "N"]:
    """Return x_i − Σ_{j≠i} x_j / (n − 1), float64 [N], over the n trajectories of a group; 0 in a group of one."""
    deviations_N = deviations(values_N, groups)
    others_N = np.maximum(groups.sizes_G - 1, 1)[groups.index_N]
    return deviations_N + groups.trajectory_mean_N(deviations_N) / others_N
