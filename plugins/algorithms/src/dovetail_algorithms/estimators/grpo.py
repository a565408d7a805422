"""GRPO: rewards relative to their group, in units of its standard deviation (arXiv 2402.03300)."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float64

from dovetail.interfaces.advantage import Groups
from dovetail_algorithms.config.estimators import GrpoConfig
from dovetail_algorithms.estimators.group_baseline import GroupBaseline, deviations

EPSILON = 1e-6


class Grpo(GroupBaseline):
    """A_i = (r_i − mean_g) / (std_g + 1e-6), with the unbiased standard deviation of the group.

    `norm_by_std: false` leaves the division out. `singleton: raw` gives a group of one its reward as it is.
    """

    name = "grpo"
    Config = GrpoConfig

    @classmethod
    def min_group_size(cls, config: Any) -> int:
        return 1 if config.singleton == "raw" else 2

    def relative(
        self, scores_N: Float64[np.ndarray, "N"], groups: Groups
    ) -> Float64[np.ndarray, "N"]:
        advantages_N = deviations(scores_N, groups)
        if self.config.norm_by_std:
            variance_G = groups.sum_G(np.square(advantages_N)) / np.maximum(groups.sizes_G - 1, 1)
            advantages_N = advantages_N / (np.sqrt(variance_G) + EPSILON)[groups.index_N]
        if self.config.singleton == "raw":
            advantages_N = np.where(groups.sizes_G[groups.index_N] == 1, scores_N, advantages_N)
        return advantages_N
