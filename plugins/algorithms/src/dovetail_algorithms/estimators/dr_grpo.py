"""Dr. GRPO: rewards relative to their group's mean (arXiv 2503.20783)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from dovetail.interfaces import Groups
from dovetail_algorithms.estimators.group_baseline import ScoreBaseline, deviations


class DrGrpoEstimator(ScoreBaseline):
    """Rewards relative to their group's mean.

    A_i = r_i − mean_g: GRPO without its biases (arXiv 2503.20783).

    Needs at least two samples a prompt, and no value model. A group's weight grows with the spread of its rewards; GRPO instead gives
    groups that are almost all right or all wrong as much weight as others.

    The paper pairs this estimator with the loss aggregation `seq_mean_token_sum_norm`, so that a response's length does not change its
    weight either.

    In a config:

        algorithm:
          loss_aggregation: {name: seq_mean_token_sum_norm, length: "${data.max_response_length}"}
    """

    name = "dr_grpo"
    aggregation = "seq_mean_token_sum_norm"

    def relative(
        self, scores_N: Float64[np.ndarray, "N"], groups: Groups
    ) -> Float64[np.ndarray, "N"]:
        return deviations(scores_N, groups)
