"""ReMax: rewards relative to the greedy response's reward (arXiv 2310.10505)."""

from __future__ import annotations

import numpy as np

from dovetail.batch import Batch
from dovetail.interfaces import Advantages, Groups, PluginConfig
from dovetail_algorithms.estimators.token_level import TokenEstimator


class RemaxEstimator(TokenEstimator):
    """Rewards relative to the reward of the greedy response.

    A_t = Σ_{s≥t} R_s − b, with b the reward of the greedy response to the same prompt (arXiv 2310.10505).

    Needs no value model and works with one sample a prompt, but costs one more response per prompt: the rollout also answers every prompt
    at temperature 0, and the reward function scores this answer. Only rewards of the policy's own tokens count; tool tokens hold 0.
    """

    name = "remax"
    scope = "sample"

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"token_rewards", "response_mask", "baseline_scores"})

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        own = self.policy_tokens(columns)
        returns_K = own.discounted_sums(own.take(columns["token_rewards"]), 1.0)
        greedy_K = np.repeat(columns["baseline_scores"], own.lengths_N)
        return Advantages(
            advantages=own.column(returns_K - greedy_K), returns=own.column(returns_K)
        )
