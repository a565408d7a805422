"""OPO: rewards relative to the group's mean reward, weighted by response length (arXiv 2505.23585)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from dovetail.batch import Batch
from dovetail.interfaces import Groups, PluginConfig
from dovetail_algorithms.estimators.group_baseline import GroupBaseline, comparable_G


class OpoEstimator(GroupBaseline):
    """Rewards relative to their group's length-weighted mean.

    A_i = r_i − Σ_j len_j r_j / Σ_j len_j over the group: the baseline of least variance (arXiv 2505.23585).

    Needs at least two samples a prompt, and no value model. The optimal baseline weighs a reward by the squared norm of its gradient,
    which is roughly proportional to the response's length. len_j counts the policy's own tokens over all sequences of a trajectory.

    The paper trains exactly on policy: one update per rollout, no KL penalty, no clipping.
    """

    name = "opo"

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"scores", "response_mask"})

    def compare(self, columns: Batch, groups: Groups) -> Float64[np.ndarray, "N"]:
        scores_N = np.asarray(columns["scores"], np.float64)
        lengths_N = columns["response_mask"].sum()
        # Summing over sequences is enough: a trajectory's length is the sum of its sequences' lengths.
        tokens_G = _sum_G(lengths_N, groups)
        # Subtracting the plain mean first avoids the loss of precision that a weighted sum of large rewards has.
        mean_N = groups.mean_N(scores_N)
        weighted_G = _sum_G(lengths_N * (scores_N - mean_N), groups)
        shift_G = weighted_G / np.maximum(tokens_G, 1)
        return np.where(
            comparable_G(scores_N, groups)[groups.index_N],
            scores_N - mean_N - shift_G[groups.index_N],
            scores_N - scores_N,  # 0; NaN for a score that is not finite
        )


def _sum_G(values_N: np.ndarray, groups: Groups) -> Float64[np.ndarray, "G"]:
    sums_G = np.bincount(groups.index_N, weights=values_N, minlength=groups.count)
    return sums_G.astype(np.float64, copy=False)  # bincount of an empty array returns int64
