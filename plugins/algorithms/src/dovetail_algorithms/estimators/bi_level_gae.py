"""Bi-level GAE: first over turns, then within each turn (VAGEN, arXiv 2510.16907)."""

from __future__ import annotations

from dovetail.batch import Batch
from dovetail.interfaces import Advantages, Groups, PluginConfig
from dovetail_algorithms.config.estimators import BiLevelGaeConfig
from dovetail_algorithms.estimators.token_level import TokenEstimator, discounted_sums, following
from dovetail_algorithms.estimators.turns import PolicyTurns


class BiLevelGaeEstimator(TokenEstimator):
    """GAE over turns for the advantage of each turn's last token, then GAE within each turn (VAGEN, arXiv 2510.16907).

    With e_k the last token of turn k:

    A_{e_k} = δ_k + γ_turn λ_turn A_{e_{k+1}},  δ_k = R_{e_k} + γ_turn V_{e_{k+1}} − V_{e_k}
    A_t = δ_t + γλ A_{t+1},  δ_t = R_t + γ V_{t+1} − V_t, for tokens t of a turn before its last

    Returns are A + V, and V after the last turn is 0. A turn's reward must be on its last token, as it is if the reward function returns
    `turn_rewards`; a reward on another token, such as a KL penalty, counts only within its turn. If both γ and both λ
    are 1 and only last tokens have rewards, this estimator equals `gae`. A `turn_gamma` below 1 discounts by turns, whatever their
    lengths.

    Needs a value model, which the plan adds as the critic. `whiten` brings the batch's advantages to mean 0 and variance 1.
    """

    name = "bi_level_gae"
    Config = BiLevelGaeConfig
    scope = "batch"

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"token_rewards", "response_mask", "turn_ids", "values"})

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        config, own = self.config, self.policy_tokens(columns)
        rewards_K, values_K = own.take(columns["token_rewards"]), own.take(columns["values"])
        turns = PolicyTurns.of(own, columns["turn_ids"])
        values_U = values_K[turns.last_U]
        next_U = following(values_U, turns.counts_J)
        deltas_U = rewards_K[turns.last_U] + config.turn_gamma * next_U - values_U
        turn_decay = config.turn_gamma * config.turn_lam
        advantages_U = turns.discounted_sums(deltas_U, turn_decay)
        next_K = following(values_K, turns.lengths_U)
        deltas_K = rewards_K + config.gamma * next_K - values_K
        deltas_K[turns.last_U] = advantages_U
        advantages_K = discounted_sums(deltas_K, turns.lengths_U, config.gamma * config.lam)
        advantages = own.column(advantages_K)
        if config.whiten:
            advantages = own.whitened(advantages, self.context.reduction)
        return Advantages(advantages=advantages, returns=own.column(advantages_K + values_K))
