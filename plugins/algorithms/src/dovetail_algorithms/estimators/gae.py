"""GAE: advantages from a value model (arXiv 1506.02438, used by PPO, arXiv 1707.06347)."""

from __future__ import annotations

from dovetail.batch import Batch
from dovetail.interfaces import Advantages, Groups, PluginConfig
from dovetail_algorithms.config.estimators import GaeConfig
from dovetail_algorithms.estimators.token_level import TokenEstimator
from dovetail_algorithms.estimators.turns import decay_over_turns


class GaeEstimator(TokenEstimator):
    """A_t = δ_t + γλ A_{t+1}, δ_t = R_t + γ V_{t+1} − V_t; returns are A + V (arXiv 1506.02438).

    The estimator of PPO (arXiv 1707.06347). Needs a value model, which the plan adds as the critic, and works with one
    sample a prompt. Use it if many tokens have rewards, or if responses are so long that one reward says little about each token.

    Only the policy's own tokens are steps: t + 1 is the next policy token, tool tokens between are skipped, and V after the last one is
    0. With `turn_gamma` the step from one turn of an episode to the next has its own discount: `gamma: 1.0, turn_gamma: 0.95` discounts
    by turns, whatever their lengths. Finally, `whiten` brings the batch's advantages to mean 0 and variance 1, as (A − mean) / √(variance
    + 1e-8).
    """

    name = "gae"
    Config = GaeConfig
    scope = "batch"

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        over_turns = {"turn_ids"} if config.turn_gamma is not None else set()
        return frozenset({"token_rewards", "response_mask", "values"} | over_turns)

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        own = self.policy_tokens(columns)
        lam = self.config.lam
        gamma = decay_over_turns(own, columns, self.config.gamma, self.config.turn_gamma)
        rewards_K, values_K = own.take(columns["token_rewards"]), own.take(columns["values"])
        deltas_K = rewards_K + gamma * own.following(values_K) - values_K
        advantages_K = own.discounted_sums(deltas_K, gamma * lam)
        advantages = own.column(advantages_K)
        if self.config.whiten:
            advantages = own.whitened(advantages, self.context.reduction)
        return Advantages(advantages=advantages, returns=own.column(advantages_K + values_K))
