"""REINFORCE++: discounted returns, whitened over the batch (arXiv 2501.03262)."""

from __future__ import annotations

from dovetail.batch import Batch
from dovetail.interfaces import Advantages, Groups, PluginConfig
from dovetail_algorithms.config.estimators import ReinforcePlusPlusConfig
from dovetail_algorithms.estimators.token_level import TokenEstimator
from dovetail_algorithms.estimators.turns import decay_over_turns


class ReinforcePlusPlusEstimator(TokenEstimator):
    """A_t = whiten(G_t), G_t = R_t + γ G_{t+1} over the policy's own tokens (arXiv 2501.03262).

    whiten(x) = (x − mean) / √(variance + 1e-8) over all of the policy's tokens in the batch; the batch mean is the only baseline. Needs
    no value model and no groups, and works with one sample a prompt. With several samples a prompt, `reinforce_plus_plus_baseline` also
    takes the prompt's difficulty into account.

    Tokens of tools and observations are not steps: returns skip them without a discount, and their advantage is 0. With `turn_gamma` the
    step from one turn of an episode to the next has its own discount.
    """

    name = "reinforce_plus_plus"
    Config = ReinforcePlusPlusConfig
    scope = "batch"

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        over_turns = {"turn_ids"} if config.turn_gamma is not None else set()
        return super().requires(config) | over_turns

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        own = self.policy_tokens(columns)
        rewards_K = own.take(columns["token_rewards"])
        gamma = decay_over_turns(own, columns, self.config.gamma, self.config.turn_gamma)
        returns = own.column(own.discounted_sums(rewards_K, gamma))
        advantages = own.whitened(returns, self.context.reduction)
        return Advantages(advantages=advantages, returns=returns)
