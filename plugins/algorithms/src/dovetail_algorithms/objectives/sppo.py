"""Sppo: the objective of self-play preference optimization (SPPO, arXiv 2405.00675).

    L = 1/N Σ_i ( Σ_t m_t log(π(y_it | x, y_<t) / π_k(y_it | x, y_<t)) − η A_i )²,   A_i = P̂(y_i ≻ π_k | x) − ½

where π_k, the policy of the last iteration, is the reference policy, and m is the response mask.
Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces import Reduction
from dovetail_algorithms.config.objectives import SppoConfig
from dovetail_algorithms.objectives.responses import ResponseObjective
from dovetail_stages import on_device


class Sppo(ResponseObjective):
    """Draws Σ_t log(π / π_ref) of each response to η A, with A the response's win rate minus ½ and π_ref the reference policy.

    Samples without a policy token have no effect.

    Metrics: `actor/loss`, and `actor/kl`, the mean log-ratio of a response in nats.

    A is the column `advantages` of the estimator `win_rate`. The reference policy is updated from the actor. In a config:

        actor: {objective: sppo}
        algorithm: {advantage: win_rate}
        ref: {update: {every: 100}}
    """

    name = "sppo"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = SppoConfig

    @classmethod
    def requires(cls, config: SppoConfig) -> frozenset[str]:
        """Return `response_mask`, `advantages` [N] and `ref_log_probs`."""
        return frozenset({"response_mask", "advantages", "ref_log_probs"})

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Batch:
        """Check the mini-batch and return it unchanged.

        Raises:
            ColumnError: advantages are per token; expected one per sample.
        """
        if isinstance(mini_batch["advantages"], Ragged):
            raise ColumnError(
                "objective 'sppo' needs one advantage for each response, but the advantages are per token",
                hint="set algorithm.advantage=win_rate",
            )
        return mini_batch

    def losses(
        self, log_ratios_N: Float[Tensor, "N"], micro_batch: Batch
    ) -> tuple[Float[Tensor, "N"], Mapping[str, Tensor]]:
        advantages_N = on_device(micro_batch["advantages"], log_ratios_N).to(log_ratios_N.dtype)
        return (log_ratios_N - self.config.eta * advantages_N).square(), {"kl": log_ratios_N}
