"""The raw reward: REINFORCE without a baseline."""

from __future__ import annotations

import numpy as np

from dovetail.batch import Batch
from dovetail.interfaces import AdvantageEstimator, Advantages, Groups, PluginConfig


class ScoreEstimator(AdvantageEstimator):
    """A_i = r_i: the reward as it is, without a baseline (Williams, 1992, https://doi.org/10.1007/BF00992696).

    Needs no groups and no value model, and works with one sample a prompt. Without a baseline the gradient has a large variance, and if
    all rewards are positive, every sample is made more likely. Use it for rewards that are already relative, such as a judge's scores
    around 0, or if a further stage computes the advantages.

    With `rollout.n: 1`, verl's `grpo` and `rloo` compute this.
    """

    name = "score"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    scope = "sample"
    level = "sample"

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"scores"})

    @classmethod
    def provides(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"advantages"})

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        columns.require(sorted(self.requires(self.config)), f"advantage estimator {self.name!r}")
        return Advantages(advantages=np.asarray(columns["scores"], np.float32))
