"""DAPO's dynamic sampling: drops groups whose rewards are all equal, since they have no gradient (arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool

from dovetail.batch import Batch
from dovetail.interfaces import Groups, PluginConfig, SampleFilter
from dovetail_algorithms.config.filters import EqualRewardsConfig
from dovetail_algorithms.filters.rewards import judged_rewards, rewards_column


class EqualRewards(SampleFilter):
    """Leaves out groups whose rewards are all equal: dynamic sampling (DAPO, arXiv 2503.14476, section 3.2).

    keep group g  ⇔  max_g r_i − min_g r_i > tolerance

    A group whose rewards are all equal has only advantages of 0. Other prompts replace the group in the next round of generation, up to
    `algorithm.max_generation_rounds`. A group that failures reduced to one sample also has equal rewards. Don't use this filter with one
    response per prompt (rollout.n = 1): every group would be left out.
    """

    name = "equal_rewards"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    action = "drop"
    Config = EqualRewardsConfig

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({rewards_column(config.component)})

    def keep(self, columns: Batch, groups: Groups) -> Bool[np.ndarray, "N"]:
        """Return a mask, bool [N]: True for the samples of groups whose rewards differ.

        Raises:
            ColumnError: a sample lacks the named component.
        """
        rewards_N = judged_rewards(columns, self.config.component, "sample filter 'equal_rewards'")
        smallest_G = np.full(groups.count, np.inf)
        largest_G = np.full(groups.count, -np.inf)
        # Keep rewards that are not finite, so that a later check stops the step instead of this filter hiding them.
        with np.errstate(invalid="ignore"):
            np.minimum.at(smallest_G, groups.index_N, rewards_N)
            np.maximum.at(largest_G, groups.index_N, rewards_N)
            equal_G = largest_G - smallest_G <= self.config.tolerance
        return ~equal_G[groups.index_N]
