"""ValueObjective: the objective of a critic, the clipped value loss of PPO (arXiv 1707.06347).

    loss = Σ ½ max((V − R)², (clip(V, V_old − c, V_old + c) − R)²) / D

where V is the value of the state before each token, V_old this value before the step's updates, and R the target of V. Σ and D are
the loss aggregation's total and denominator. Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import (
    OUTPUTS,
    Objective,
    ObjectiveTerm,
    OutputSpec,
    PluginContext,
    Reduction,
)
from dovetail.metrics import Metric
from dovetail.plugins import loss_aggregation
from dovetail_algorithms.config.objectives import ValueConfig
from dovetail_stages import (
    ExplainedVariance,
    all_finite,
    loss_denominators,
    loss_share,
    mean_metric,
    metric_weight,
    on_device,
    token_column,
)


class ValueObjective(Objective):
    """Squared error to the returns, clipped around the values before the step's updates."""

    name = "value"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = ValueConfig
    key_figures = {}  # noqa: RUF012

    def __init__(self, config: ValueConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._aggregation = loss_aggregation(config.loss_aggregation, context)

    @classmethod
    def outputs(cls, config: ValueConfig) -> tuple[OutputSpec, ...]:
        return (OUTPUTS["values"],)

    @classmethod
    def requires(cls, config: ValueConfig) -> frozenset[str]:
        """Return `response_mask`, `values` (from before the update) and `returns`, which may have one number per token or per sample."""
        return frozenset({"response_mask", "values", "returns"})

    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        return loss_denominators(self._aggregation, mini_batch, reduction)

    def term(
        self,
        outputs: Mapping[str, Float[Tensor, "T"]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
        scalars: Mapping[str, float],
    ) -> ObjectiveTerm:
        """Compute the loss term (see `Objective.term`). Metrics: `critic/value_loss`, `critic/value_clip_frac` (tokens whose loss is the
        clipped one), `critic/value_mean`, `critic/return_mean`, `critic/value_error` (mean of |V − R|), and `critic/explained_variance`
        of the values before the update.
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
        if self.config.clip is not None:
            old_T = token_column(micro_batch, "values", mask, mask_T, values_T)
            near_T = torch.clamp(values_T, old_T - self.config.clip, old_T + self.config.clip)
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
