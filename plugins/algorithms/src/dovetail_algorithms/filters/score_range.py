"""The accuracy filter: leaves out prompts that are too hard or too easy (PRIME, arXiv 2502.01456)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool

from dovetail.batch import Batch
from dovetail.interfaces import Groups, PluginConfig, SampleFilter
from dovetail_algorithms.config.filters import ScoreRangeConfig
from dovetail_algorithms.filters.rewards import judged_rewards, rewards_column

ROUNDING = 1e-6
"""Tolerance of the bounds, for the rounding error in the mean of float32 rewards."""


class ScoreRange(SampleFilter):
    """Keeps groups whose mean reward is within bounds (online prompt filtering of PRIME, arXiv 2502.01456).

    keep group g  ⇔  lower ≤ mean_g r_i ≤ upper

    Both bounds are inclusive. A trajectory counts once in the mean of its group. With `unit: sample` each sample is judged by its own
    reward. For rewards of 0 and 1, `lower: 0.2` and `upper: 0.8` keep prompts with 20% to 80% right responses. Without bounds everything
    is kept.

    In a config:

        algorithm:
          sample_filters:
          - {name: score_range, lower: 0.2, upper: 0.8, unit: group}
    """

    name = "score_range"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    action = "drop"
    Config = ScoreRangeConfig

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({rewards_column(config.component)})

    def keep(self, columns: Batch, groups: Groups) -> Bool[np.ndarray, "N"]:
        """Return a mask, bool [N]: True where the group's mean reward, or with `unit: sample` the sample's own, is within the bounds.

        Rewards that are not finite are kept, so that a later check stops the step.

        Raises:
            ColumnError: a sample lacks the named component.
        """
        rewards_N = judged_rewards(columns, self.config.component, "sample filter 'score_range'")
        whole_groups = self.config.unit == "group"
        judged_N = groups.mean_N(rewards_N) if whole_groups else groups.trajectory_mean_N(rewards_N)
        lower = -np.inf if self.config.lower is None else self.config.lower - ROUNDING
        upper = np.inf if self.config.upper is None else self.config.upper + ROUNDING
        # Keep rewards that are not finite, so that a later check stops the step instead of this filter hiding them.
        within_N = (judged_N >= lower) & (judged_N <= upper)
        return within_N | ~np.isfinite(judged_N)
