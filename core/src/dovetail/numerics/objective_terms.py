"""What objectives are written with: denominators of a loss aggregation, and a micro-batch's share of a mini-batch.

Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dovetail.batch.batch import Batch
from dovetail.interfaces.plugin import Reduction
from dovetail.interfaces.policy_loss import LossAggregation
from dovetail.metrics import Mean


def loss_denominators(
    aggregation: LossAggregation, mini_batch: Batch, reduction: Reduction
) -> dict[str, float]:
    """Return what sums over the whole mini-batch are divided by: `loss`, and `samples` for metrics.

    Args:
        aggregation: says what a sum of token losses is divided by.
        mini_batch: this rank's part of it; needs `response_mask`.
        reduction: sums over the ranks that hold the other parts.
    """
    loss = aggregation.denominator(mini_batch["response_mask"])
    summed, samples = reduction.sum(np.array([loss, len(mini_batch)], np.float64)).tolist()
    return {"loss": loss if aggregation.constant else summed, "samples": samples}


def metric_weight(micro_batch: Batch, denominators: Mapping[str, float]) -> float:
    """A micro-batch's share of the samples: weights add up to 1 over a mini-batch, so that a `loss_share` is a sum
    within it and a mean over several.
    """
    return len(micro_batch) / (denominators["samples"] or 1.0)


def loss_share(loss: Float[Tensor, ""], weight: float) -> Mean:
    """A micro-batch's part of a mini-batch's loss as a metric, not yet fetched."""
    return Mean(cast("float", loss.detach()), weight)


def all_finite(
    loss: Float[Tensor, ""], outputs: Mapping[str, Float[Tensor, "T"]]
) -> Bool[Tensor, ""]:
    """Whether the loss and all outputs [T] are finite, bool []; nothing is fetched."""
    checks = [torch.isfinite(values_T.detach()).all() for values_T in outputs.values()]
    return torch.stack([torch.isfinite(loss.detach()), *checks]).all()
