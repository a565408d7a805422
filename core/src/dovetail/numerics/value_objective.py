"""ValueObjective: what a critic minimises, the clipped value loss of PPO (arXiv 1707.06347).

    loss = Σ ½ max((V − R)², (clip(V, V_old − c, V_old + c) − R)²) / D

where V is the value of the state before each token, V_old the one before the step's updates, R its target, and Σ and D
are the loss aggregation's. Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dovetail.batch.batch import Batch
from dovetail.batch.ragged import Ragged
from dovetail.interfaces.objective import ValueObjectiveSpec
from dovetail.interfaces.policy_loss import LossAggregation
from dovetail.metrics import Metric
from dovetail.numerics.deferred import mean_metric
from dovetail.numerics.explained_variance import ExplainedVariance
from dovetail.numerics.objective import (
    Objective,
    ObjectiveTerm,
    all_finite,
    loss_share,
    metric_weight,
)
from dovetail.numerics.token_columns import on_device, token_column


class ValueObjective(Objective):
    """Squared error to the returns, clipped around the values before the step's updates."""

    def __init__(self, spec: ValueObjectiveSpec, aggregation: LossAggregation) -> None:
        super().__init__(aggregation, "the value objective")
        self.spec = spec

    @property
    def outputs(self) -> frozenset[str]:
        """`values`."""
        return self.spec.outputs

    @property
    def requires(self) -> frozenset[str]:
        """`response_mask`, `values` before the update, and `returns`: a ragged column, or one number a sample."""
        return self.spec.requires

    def __call__(
        self,
        outputs: Mapping[str, Float[Tensor, "T"]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
    ) -> ObjectiveTerm:
        """As in `Objective`. Metrics: `critic/value_loss`, `critic/value_clip_frac` (tokens whose loss is the clipped
        one), `critic/value_mean`, `critic/return_mean`, `critic/value_error` (mean of |V − R|), and
        `critic/explained_variance` of the values before the update.
        """
        mask: Ragged = micro_batch["response_mask"]
        mask_T = on_device(mask.values, outputs["values"]).bool()
        values_T = outputs["values"].masked_fill(~mask_T, 0)
        offsets_N1 = on_device(mask.offsets, values_T)
        returns_T = token_column(micro_batch, "returns", mask, mask_T, values_T)
        error_T = values_T - returns_T
        squares_T = error_T.square()
        count = mask_T.sum()
        metrics: dict[str, Metric] = {
            "critic/value_mean": mean_metric(values_T, mask_T, count),
            "critic/return_mean": mean_metric(returns_T, mask_T, count),
            "critic/value_error": mean_metric(error_T.abs(), mask_T, count),
            "critic/explained_variance": _explained(micro_batch, mask),
        }
        if self.spec.clip is not None:
            old_T = token_column(micro_batch, "values", mask, mask_T, values_T)
            near_T = torch.clamp(values_T, old_T - self.spec.clip, old_T + self.spec.clip)
            clipped_T = (near_T - returns_T).square()
            held_T = clipped_T.detach() > squares_T.detach()
            metrics["critic/value_clip_frac"] = mean_metric(held_T, mask_T, count)
            squares_T = torch.where(held_T, clipped_T, squares_T)
        total = self._aggregation.total(0.5 * squares_T, mask_T, offsets_N1)
        loss = total / (denominators["loss"] or 1.0)
        metrics["critic/value_loss"] = loss_share(loss, metric_weight(micro_batch, denominators))
        return ObjectiveTerm(
            loss=loss, metrics=metrics, finite=all_finite(loss, {"values": values_T})
        )


def _explained(micro_batch: Batch, mask: Ragged) -> ExplainedVariance:
    columns = (micro_batch["values"], micro_batch["returns"])
    old_T, returns_T = (
        c.values if isinstance(c, Ragged) else np.repeat(c, mask.lengths) for c in columns
    )
    return ExplainedVariance.of(old_T, returns_T, mask.values.astype(bool))
