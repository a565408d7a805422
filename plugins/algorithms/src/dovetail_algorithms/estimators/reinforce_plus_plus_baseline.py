"""REINFORCE++ with the group's mean as baseline (arXiv 2501.03262)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from dovetail.batch import Batch
from dovetail.interfaces import Groups, PluginConfig
from dovetail_algorithms.estimators.group_baseline import GroupBaseline, deviations
from dovetail_algorithms.estimators.whitened import whiten_over_tokens


class ReinforcePlusPlusBaselineEstimator(GroupBaseline):
    """Rewards relative to their group's mean, whitened over the batch.

    A_i = whiten(r_i − mean_g): the group's mean as baseline, the batch's spread as unit (arXiv 2501.03262).

    whiten(x) = (x − mean) / √(variance + 1e-8) over all of the policy's tokens in the batch, so that a sample
    weighs by its number of tokens. Needs at least two samples a prompt, and no value model. GRPO divides by each group's own spread; one
    unit for the whole batch keeps an easy prompt from weighing as much as an informative one.
    """

    name = "reinforce_plus_plus_baseline"
    scope = "batch"

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"scores", "response_mask"})

    def compare(self, columns: Batch, groups: Groups) -> Float64[np.ndarray, "N"]:
        scores_N = np.asarray(columns["scores"], np.float64)
        deviations_N = deviations(scores_N, groups)
        return whiten_over_tokens(
            deviations_N, columns["response_mask"], groups, self.context.reduction
        )
