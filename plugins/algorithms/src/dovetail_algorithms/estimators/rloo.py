"""RLOO: rewards relative to the mean of the group's other samples (arXiv 2402.14740)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from dovetail.interfaces.advantage import Groups
from dovetail_algorithms.config.estimators import RlooConfig
from dovetail_algorithms.estimators.group_baseline import GroupBaseline, deviations


class Rloo(GroupBaseline):
    """A_i = r_i − Σ_{j≠i} r_j / (n − 1), which is n / (n − 1) · (r_i − mean_g)."""

    name = "rloo"
    Config = RlooConfig

    def relative(
        self, scores_N: Float64[np.ndarray, "N"], groups: Groups
    ) -> Float64[np.ndarray, "N"]:
        sizes_N = groups.sizes_G[groups.index_N]
        advantages_N: np.ndarray = (
            deviations(scores_N, groups) * sizes_N / np.maximum(sizes_N - 1, 1)
        )
        return advantages_N
