"""GRPO: rewards relative to their group, in units of its standard deviation (arXiv 2402.03300)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from dovetail.interfaces import Groups, PluginConfig
from dovetail_algorithms.config.estimators import GrpoConfig
from dovetail_algorithms.estimators.group_baseline import ScoreBaseline, relative_to_group


class GrpoEstimator(ScoreBaseline):
    """A_i = (r_i − mean_g) / (std_g + 1e-6), with the unbiased standard deviation (arXiv 2402.03300).

    Needs at least two samples a prompt, and no value model: the group is the baseline. All tokens of
    a response get the same advantage. Dividing by the spread gives all groups with unequal rewards about the same weight, whether one
    sample in two is right or one in sixteen.

    `norm_by_std: false` omits the division. With `singleton: raw`, a sample alone in its group has its raw reward as advantage.
    """

    name = "grpo"
    Config = GrpoConfig

    @classmethod
    def min_group_size(cls, config: PluginConfig) -> int:
        return 1 if config.singleton == "raw" else 2

    def relative(
        self, scores_N: Float64[np.ndarray, "N"], groups: Groups
    ) -> Float64[np.ndarray, "N"]:
        advantages_N = relative_to_group(scores_N, groups, by_std=self.config.norm_by_std)
        if self.config.singleton == "raw":
            advantages_N = np.where(groups.sizes_G[groups.index_N] == 1, scores_N, advantages_N)
        return advantages_N
