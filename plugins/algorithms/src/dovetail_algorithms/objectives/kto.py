"""Kto: Kahneman–Tversky optimization, on responses that were rated one by one.

    r = Σ_t log π(y_t) − log π_ref(y_t)        z = max(0, 1/N Σ_i log π(y_j|x_i) − log π_ref(y_j|x_i)), j the sample before i

    ℓ = λ_D (1 − σ(β (r − z))) for a desirable response,  λ_U (1 − σ(β (z − r))) for an undesirable one    L = 1/N Σ ℓ

(arXiv 2402.01306, equations 7 and 8). z estimates the policy's divergence from the reference over the whole mini-batch, without
gradient. The stage `mismatched_responses` scores each response under another sample's prompt for z. Legend: N samples, T response tokens,
packed end to end.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import OUTPUTS, Objective, ObjectiveTerm, OutputSpec, Reduction
from dovetail_algorithms.config.objectives import KtoConfig
from dovetail_stages import (
    all_finite,
    loss_share,
    mean_metric,
    on_device,
    sum_by_sample,
    token_column,
)

_MISMATCHED, _DIVERGENCE = "mismatched_log_ratios", "kto.divergence"


class Kto(Objective):
    """Makes desirable responses likelier than under the reference, and all others less likely."""

    name = "kto"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = KtoConfig
    config: KtoConfig
    key_figures = {"loss": "down", "accuracy": "up"}  # noqa: RUF012

    @classmethod
    def outputs(cls, config: KtoConfig) -> tuple[OutputSpec, ...]:
        return (OUTPUTS["log_probs"],)

    @classmethod
    def requires(cls, config: KtoConfig) -> frozenset[str]:
        """Return `response_mask`, `ref_log_probs`, `desirable`, and `mismatched_log_ratios` of the stage `mismatched_responses`."""
        return frozenset({"response_mask", "ref_log_probs", "desirable", _MISMATCHED})

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Batch:
        own = np.array([mini_batch[_MISMATCHED].sum(dtype=np.float64), len(mini_batch)], np.float64)
        total, samples = reduction.sum(own).tolist()
        divergence = max(0.0, total / (samples or 1.0))
        return mini_batch.with_columns(
            {_DIVERGENCE: np.full(len(mini_batch), divergence, np.float32)}
        )

    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        return {"samples": float(reduction.sum(np.array([len(mini_batch)], np.float64))[0])}

    def term(
        self,
        outputs: Mapping[str, Float[Tensor, "T"]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
        scalars: Mapping[str, float],
    ) -> ObjectiveTerm:
        """Compute the loss term (see `Objective.term`).

        r is a response's log-ratio to the reference, and z the estimated KL divergence from the reference. Metrics: `actor/loss`;
        `actor/accuracy`, the share of responses on the right side of z (r > z if desirable, else r < z), with ties as half;
        `actor/desirable_reward` and `actor/undesirable_reward`, means of β r; and `actor/divergence`, z in nats.
        """
        mask: Ragged = micro_batch["response_mask"]
        mask_T = on_device(mask.values, outputs["log_probs"]).bool()
        log_probs_T = outputs["log_probs"].masked_fill(~mask_T, 0)
        reference_T = token_column(micro_batch, "ref_log_probs", mask, mask_T, log_probs_T)
        ratios_N = sum_by_sample(log_probs_T - reference_T, on_device(mask.offsets, log_probs_T))
        desirable_N = on_device(micro_batch["desirable"], ratios_N).bool()
        divergence_N = on_device(micro_batch[_DIVERGENCE], ratios_N)

        sign_N = torch.where(desirable_N, 1.0, -1.0)
        weight_N = torch.where(
            desirable_N, self.config.desirable_weight, self.config.undesirable_weight
        )
        ahead_N = self.config.beta * sign_N * (ratios_N - divergence_N)
        samples = denominators["samples"] or 1.0
        loss = (weight_N * torch.sigmoid(-ahead_N)).sum() / samples
        every_N = torch.ones_like(desirable_N)
        rewards_N = self.config.beta * ratios_N
        return ObjectiveTerm(
            loss=loss,
            metrics={
                "actor/loss": loss_share(loss, len(ratios_N) / samples),
                "actor/accuracy": mean_metric((ahead_N.detach().sign() + 1) / 2, every_N),
                "actor/desirable_reward": mean_metric(rewards_N, desirable_N),
                "actor/undesirable_reward": mean_metric(rewards_N, ~desirable_N),
                "actor/divergence": mean_metric(divergence_N, every_N),
            },
            finite=all_finite(loss, {"log_probs": log_probs_T}),
        )
