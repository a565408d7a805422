"""Sppo: what self-play preference optimization minimises (SPPO, arXiv 2405.00675).

    L = 1/N Σ_i ( Σ_t m_t log(π(y_it | x, y_<t) / π_k(y_it | x, y_<t)) − η A_i )²,   A_i = P̂(y_i ≻ π_k | x) − ½

where π_k is the policy of the last iteration and m the response mask. Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from torch import Tensor

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces import OUTPUTS, Objective, ObjectiveTerm, OutputSpec, Reduction
from dovetail.metrics import Metric
from dovetail.numerics import (
    all_finite,
    loss_share,
    mean_metric,
    on_device,
    sum_by_sample,
    token_column,
)
from dovetail_algorithms.config.objectives import SppoConfig


class Sppo(Objective):
    """Draws each response's log-ratio to what its win rate says. Samples without a token of the policy count for nothing.

    A is the column `advantages` of the estimator `win_rate`, π_k the reference policy, which follows the actor. In a config:

        actor: {objective: sppo}
        algorithm: {advantage: win_rate}
        ref: {update: {every: 100}}
    """

    name = "sppo"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = SppoConfig

    @classmethod
    def outputs(cls, config: SppoConfig) -> tuple[OutputSpec, ...]:
        return (OUTPUTS["log_probs"],)

    @classmethod
    def requires(cls, config: SppoConfig) -> frozenset[str]:
        """`response_mask`, `advantages` [N] and `ref_log_probs`."""
        return frozenset({"response_mask", "advantages", "ref_log_probs"})

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Batch:
        """As in `Objective`.

        Raises:
            ColumnError: advantages are those of single tokens.
        """
        if isinstance(mini_batch["advantages"], Ragged):
            raise ColumnError(
                "objective 'sppo' compares whole responses, and the advantages are those of single tokens",
                hint="set algorithm.advantage=win_rate",
            )
        return mini_batch

    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        own = np.array([(mini_batch["response_mask"].sum() > 0).sum()], np.float64)
        return {"samples": float(reduction.sum(own)[0])}

    def term(
        self,
        outputs: Mapping[str, Float[Tensor, "T"]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
        scalars: Mapping[str, float],
    ) -> ObjectiveTerm:
        """As in `Objective`. Metrics: `actor/loss`, and `actor/kl`, the mean log-ratio of a response in nats."""
        mask: Ragged = micro_batch["response_mask"]
        mask_T = on_device(mask.values, outputs["log_probs"]).bool()
        log_probs_T = outputs["log_probs"].masked_fill(~mask_T, 0)
        reference_T = token_column(micro_batch, "ref_log_probs", mask, mask_T, log_probs_T)
        log_ratios_N = sum_by_sample(
            log_probs_T - reference_T, on_device(mask.offsets, log_probs_T)
        )
        advantages_N = on_device(micro_batch["advantages"], log_ratios_N).to(log_ratios_N.dtype)
        there_N = on_device(mask.sum() > 0, log_ratios_N)
        losses_N = (log_ratios_N - self.config.eta * advantages_N).square()
        samples = denominators["samples"] or 1.0
        loss = losses_N.masked_fill(~there_N, 0).sum() / samples
        metrics: dict[str, Metric] = {
            "actor/loss": loss_share(loss, int(there_N.sum()) / samples),
            "actor/kl": mean_metric(log_ratios_N, there_N),
        }
        return ObjectiveTerm(
            loss=loss, metrics=metrics, finite=all_finite(loss, {"log_probs": log_probs_T})
        )
