"""PRIME: implicit process rewards and outcomes, each relative to the group's other samples (arXiv 2502.01456)."""

from __future__ import annotations

import numpy as np

from dovetail.batch import Batch
from dovetail.interfaces import Advantages, Groups, PluginConfig
from dovetail_algorithms.config.estimators import PrimeConfig
from dovetail_algorithms.estimators.group_baseline import group_metrics
from dovetail_algorithms.estimators.rloo import leave_one_out
from dovetail_algorithms.estimators.token_level import TokenEstimator


class PrimeEstimator(TokenEstimator):
    """A_it = Σ_{s≥t} γ^{s−t} (r_is − 1/(n−1) Σ_{j≠i} r̄_j) + o_i − 1/(n−1) Σ_{j≠i} o_j (arXiv 2502.01456).

    r_is is the implicit process reward of token s of sample i, r̄_j the mean of these rewards over sample j, and o_i the outcome, sample
    i's score. Sums and means are over the policy's own tokens. A sample alone in its group has advantages of 0, and a metric counts such
    groups.

    Requires the column `process_rewards`, which the stage `implicit_process_rewards` computes with a model that is trained beside the
    policy. In a config:

        algorithm: {advantage: prime}
        roles:
          prm: {objective: {name: implicit_prm, beta: 0.05}, optim: {lr: 1.0e-6}}
    """

    name = "prime"
    Config = PrimeConfig
    scope = "group"

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"scores", "process_rewards", "response_mask"})

    @classmethod
    def provides(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"advantages"})

    @classmethod
    def min_group_size(cls, config: PluginConfig) -> int:
        return 2

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        own = self.policy_tokens(columns)
        rewards_K = own.take(columns["process_rewards"])
        row_K = np.repeat(np.arange(len(own.lengths_N)), own.lengths_N)
        sums_N = np.bincount(row_K, weights=rewards_K, minlength=len(own.lengths_N))
        means_N = sums_N / np.maximum(own.lengths_N, 1)
        # `leave_one_out` returns a sample's mean minus the mean of the others, so this is the mean of the others.
        baselines_N = means_N - leave_one_out(means_N, groups)
        outcomes_N = leave_one_out(np.asarray(columns["scores"], np.float64), groups)
        process_K = own.discounted_sums(rewards_K - baselines_N[row_K], self.config.gamma)
        compared_N = (groups.sizes_G > 1)[groups.index_N]
        advantages_K = np.where(compared_N[row_K], process_K + outcomes_N[row_K], 0.0)
        advantages = own.column(advantages_K)
        moved_N = np.bincount(row_K, weights=np.abs(advantages_K), minlength=len(own.lengths_N))
        return Advantages(advantages=advantages, metrics=group_metrics(moved_N, groups))
