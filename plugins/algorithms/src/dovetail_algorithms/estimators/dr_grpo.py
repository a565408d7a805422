"""Dr. GRPO: rewards relative to their group's mean (arXiv 2503.20783)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from dovetail.interfaces.advantage import Groups
from dovetail_algorithms.config.estimators import DrGrpoConfig
from dovetail_algorithms.estimators.group_baseline import GroupBaseline, deviations


class DrGrpo(GroupBaseline):
    """A_i = r_i − mean_g.

    The paper pairs it with the loss aggregation `seq_mean_token_sum_norm`, so that neither the spread of
    a group nor the length of a response weighs.
    """

    name = "dr_grpo"
    Config = DrGrpoConfig

    def relative(
        self, scores_N: Float64[np.ndarray, "N"], groups: Groups
    ) -> Float64[np.ndarray, "N"]:
        return deviations(scores_N, groups)
