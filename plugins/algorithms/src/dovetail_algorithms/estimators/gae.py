"""GAE: advantages from a value model (arXiv 1506.02438, used by PPO, arXiv 1707.06347)."""

from __future__ import annotations

from typing import Any

from dovetail.batch import Batch
from dovetail.interfaces import Advantages, Groups
from dovetail_algorithms.config.estimators import GaeConfig
from dovetail_algorithms.estimators.scans import gae, whiten
from dovetail_algorithms.estimators.token_level import TokenEstimator


class Gae(TokenEstimator):
    """A_t = δ_t + γλ A_{t+1}, δ_t = R_t + γ V_{t+1} − V_t; returns are A + V (arXiv 1506.02438).

    The estimator of PPO (arXiv 1707.06347). Needs a value model, which the plan adds as the critic, and works with one
    sample a prompt. It is the choice where rewards come at many tokens, or where a response is long enough for
    one reward to say little about each token.

    Only the policy's own tokens take time: t + 1 is the next of them, over tool tokens that lie between, and
    V after the last is 0. `whiten` then brings the batch's advantages to mean 0 and variance 1, as
    (A − mean) / √(variance + 1e-8).
    """

    name = "gae"
    Config = GaeConfig
    scope = "batch"

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"token_rewards", "response_mask", "values"})

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        mask = self.mask(columns)
        advantages_T, returns_T = gae(
            columns["token_rewards"].values,
            columns["values"].values,
            mask.values,
            mask.offsets,
            self.config.gamma,
            self.config.lam,
        )
        if self.config.whiten:
            advantages_T = whiten(advantages_T, mask.values, self.context.reduction, in_place=True)
        return Advantages(
            advantages=mask.with_values(advantages_T), returns=mask.with_values(returns_T)
        )
