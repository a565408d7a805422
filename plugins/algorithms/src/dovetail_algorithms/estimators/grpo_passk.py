"""GRPO for pass@k: only the best sample of a group learns (arXiv 2503.19595)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from dovetail.interfaces import Groups
from dovetail_algorithms.config.estimators import GrpoPasskConfig
from dovetail_algorithms.estimators.group_baseline import (
    EPSILON,
    ScoreBaseline,
    deviation_spread_N,
    deviations,
)


class GrpoPasskEstimator(ScoreBaseline):
    """A = r_max − r_second for the best sample of a group, and 0 for all others (arXiv 2503.19595).

    pass@k counts only the best of k samples, so its lead over the second best is what the group gains. If two samples are equally best,
    the whole group has 0. Needs at least two samples a prompt, and no value model. The signal is sparse: use large groups.

    `norm_by_std: true` divides the lead by the group's standard deviation of rewards + 1e-6.
    """

    name = "grpo_passk"
    Config = GrpoPasskConfig

    def relative(
        self, scores_N: Float64[np.ndarray, "N"], groups: Groups
    ) -> Float64[np.ndarray, "N"]:
        lead_N = _lead_of_the_best(scores_N, groups)
        if self.config.norm_by_std:
            spread_N = deviation_spread_N(deviations(scores_N, groups), groups)
            lead_N = lead_N / (spread_N + EPSILON)
        return lead_N


def _lead_of_the_best(
    scores_N: Float64[np.ndarray, "N"], groups: Groups
) -> Float64[np.ndarray, "N"]:
    """Return r_max − r_second for the best trajectory of each group and 0 for the other trajectories, float64 [N]."""
    means_N = groups.trajectory_mean_N(scores_N)
    if groups.trajectory_N is None:
        first_J = trajectory_N = np.arange(len(scores_N))
    else:
        _, first_J, trajectory_N = np.unique(
            groups.trajectory_N, return_index=True, return_inverse=True
        )
    # The J trajectories sorted by group, and within a group by reward: the best stands last.
    order_J = np.lexsort((means_N[first_J], groups.index_N[first_J]))
    sizes_G = groups.sizes_G
    last_G = (np.cumsum(sizes_G) - 1)[sizes_G > 1]
    best_G, second_G = first_J[order_J[last_G]], first_J[order_J[last_G - 1]]
    lead_J = means_N[first_J] - means_N[first_J]  # 0; NaN for a score that is not finite
    lead_J[order_J[last_G]] = means_N[best_G] - means_N[second_G]
    return lead_J[trajectory_N]
