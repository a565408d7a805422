"""Mine: the reward of a sample above the mean of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from dovetail.interfaces import AdvantageEstimator, Advantages, Groups

from dovetail_mine.config import MineConfig

if TYPE_CHECKING:
    from dovetail.batch import Batch


class Mine(AdvantageEstimator):
    """A_i = scale · (r_i − mean of the group); a group of one gives 0."""

    name = "mine"
    api = ">=1.0,<2"
    Config = MineConfig
    scope = "group"
    level = "sample"

    @classmethod
    def requires(cls, config: MineConfig) -> frozenset[str]:
        return frozenset({"scores"})

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        scores_N = columns["scores"].astype(np.float64)
        advantages_N = self.config.scale * (scores_N - groups.mean_N(scores_N))
        return Advantages(advantages=advantages_N.astype(np.float32))
