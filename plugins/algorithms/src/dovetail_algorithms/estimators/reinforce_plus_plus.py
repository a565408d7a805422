"""REINFORCE++: discounted returns, whitened over the batch (arXiv 2501.03262)."""

from __future__ import annotations

from dovetail.batch import Batch
from dovetail.interfaces import Advantages, Groups
from dovetail.numerics import whiten
from dovetail_algorithms.config.estimators import ReinforcePlusPlusConfig
from dovetail_algorithms.estimators.token_level import TokenEstimator


class ReinforcePlusPlusEstimator(TokenEstimator):
    """A_t = whiten(G_t), G_t = R_t + γ G_{t+1} over the policy's own tokens (arXiv 2501.03262).

    whiten(x) = (x − mean) / √(variance + 1e-8) over all tokens of the batch, which is the only baseline: it needs no
    value model and no groups, and works with one sample a prompt. With several, `reinforce_plus_plus_baseline`
    also takes the prompt's difficulty into account.

    Tokens of tools and observations take no time: returns pass over them undiscounted, and they hold 0.
    """

    name = "reinforce_plus_plus"
    Config = ReinforcePlusPlusConfig
    scope = "batch"

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        own = self.policy_tokens(columns)
        rewards_K = own.take(columns["token_rewards"])
        returns = own.column(own.discounted_sums(rewards_K, self.config.gamma))
        white_T = whiten(returns.values, own.mask.values, self.context.reduction)
        return Advantages(advantages=own.mask.with_values(white_T), returns=returns)
