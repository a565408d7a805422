"""GPG: rewards relative to their group's mean, scaled up to make up for groups whose rewards are all equal (arXiv 2504.02546)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from dovetail.interfaces import Groups
from dovetail_algorithms.estimators.group_baseline import (
    ScoreBaseline,
    comparable_G,
    deviations,
)


class GpgEstimator(ScoreBaseline):
    """Rewards relative to their group's mean, scaled up to make up for groups whose rewards are all equal.

    A_i = α (r_i − mean_g), α = N / (N − M) (arXiv 2504.02546).

    N is the number of samples in the batch, M the number in groups whose rewards are all equal. These M samples have no gradient, and α
    makes up for their share of the mean. Needs at least two samples a prompt, and no value model.

    The paper pairs this estimator with the policy loss `gpg`: no clipping, no reference policy. If no group has
    unequal rewards, all advantages are 0.
    """

    name = "gpg"
    scope = "batch"

    def relative(
        self, scores_N: Float64[np.ndarray, "N"], groups: Groups
    ) -> Float64[np.ndarray, "N"]:
        sizes_G = groups.sizes_G
        informative = sizes_G[comparable_G(scores_N, groups)].sum()
        counts = self.context.reduction.sum(np.array([sizes_G.sum(), informative], np.float64))
        alpha = float(counts[0]) / max(float(counts[1]), 1.0)
        return alpha * deviations(scores_N, groups)
