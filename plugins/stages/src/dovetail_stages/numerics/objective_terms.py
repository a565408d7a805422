"""Helpers to write objectives: columns as tensors, denominators of a loss aggregation, a micro-batch's share of a mini-batch, pairs.

Legend: N samples, P pairs, T response tokens, packed end to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces import LossAggregation, Reduction
from dovetail.metrics import Mean


def token_column(
    batch: Batch, name: str, mask: Ragged, mask_T: Bool[Tensor, "T"], like: Float[Tensor, "T"]
) -> Float[Tensor, "T *inner"]:
    """Return a column as a tensor [T] or [T, …], on the device and in the dtype of `like`; 0 on masked tokens.

    Args:
        batch: N samples, with the column: ragged over response tokens, or dense, [N] or [N, …]. Each value of a dense
            column is repeated over the sample's tokens.
        name: the name of the column.
        mask: the batch's `response_mask`.
        mask_T: bool [T], the mask as a tensor.
        like: float [T].

    Raises:
        ColumnError: the column does not line up with the mask, or holds no numbers.
    """
    values = batch[name]
    if isinstance(values, Ragged):
        if not np.array_equal(values.offsets, mask.offsets):
            raise ColumnError(
                f"column {name!r} does not line up with response_mask: it has {len(values.values)} values "
                f"over {len(values)} samples; the mask has {len(mask.values)} values",
                hint="give one value for each response token, or one for each sample",
            )
        flat = values.values
    elif isinstance(values, np.ndarray):
        flat = np.repeat(values, mask.lengths, axis=0)
    else:
        raise ColumnError(
            f"column {name!r} has neither one number per token nor one per sample, so no loss can read it"
        )
    hidden_T = ~mask_T.reshape(-1, *(1,) * (flat.ndim - 1))
    return on_device(flat, like).to(like.dtype).masked_fill(hidden_T, 0)


def on_device(values: Shaped[np.ndarray, "K *inner"], like: Tensor) -> Shaped[Tensor, "K *inner"]:
    """Return an array [K] or [K, …] as a tensor of its own dtype on the device of `like`."""
    # Arrays from other processes are read-only, and are copied, since torch has no read-only tensors.
    tensor = torch.from_numpy(np.require(values, requirements=["C", "W"]))
    if like.device.type == "cpu":
        return tensor
    # Pinned, since a copy from other memory would make the host wait until the device has finished its queue.
    return tensor.pin_memory().to(like.device, non_blocking=True)


def loss_denominators(
    aggregation: LossAggregation, mini_batch: Batch, reduction: Reduction
) -> dict[str, float]:
    """Return the denominators of sums over the whole mini-batch: `loss`, and `samples` for metrics.

    Args:
        aggregation: the loss aggregation, which determines the denominator `loss`.
        mini_batch: this rank's part of the mini-batch; needs `response_mask`.
        reduction: the sum over the ranks that share the mini-batch.
    """
    loss = aggregation.denominator(mini_batch["response_mask"])
    summed, samples = reduction.sum(np.array([loss, len(mini_batch)], np.float64)).tolist()
    return {"loss": loss if aggregation.constant else summed, "samples": samples}


def metric_weight(micro_batch: Batch, denominators: Mapping[str, float]) -> float:
    """Return a micro-batch's share of the mini-batch's samples.

    The share is the weight of a `loss_share` metric. The shares of one mini-batch add up to 1: the metrics of its micro-batches merge to
    the mini-batch's loss, and those of several mini-batches to the mean of their losses.
    """
    return len(micro_batch) / (denominators["samples"] or 1.0)


def loss_share(loss: Float[Tensor, ""], weight: float) -> Mean:
    """Return a micro-batch's part of a mini-batch's loss as a metric, not yet fetched from the device; `metric_weight` gives `weight`."""
    return Mean(cast("float", loss.detach()), weight)


def all_finite(
    loss: Float[Tensor, ""], outputs: Mapping[str, Float[Tensor, "T"]]
) -> Bool[Tensor, ""]:
    """Return whether the loss and all outputs [T] are finite, bool [], not yet fetched from the device."""
    checks = [torch.isfinite(values_T.detach()).all() for values_T in outputs.values()]
    return torch.stack([torch.isfinite(loss.detach()), *checks]).all()


def pair_rows(batch: Batch) -> tuple[Int64[np.ndarray, "P"], Int64[np.ndarray, "P"]]:
    """Return the rows of the chosen responses and of the rejected responses, each ordered by pair id.

    Args:
        batch: 2P samples, in any order; needs `pair_id` and `chosen`.

    Raises:
        ColumnError: a pair does not have exactly one chosen and one rejected response.
    """
    chosen_N = np.asarray(batch["chosen"], np.bool_)
    ids_P, pair_N = np.unique(batch["pair_id"], return_inverse=True)
    sides_P2 = np.stack(
        [np.bincount(pair_N[side], minlength=len(ids_P)) for side in (chosen_N, ~chosen_N)], 1
    )
    odd = np.flatnonzero((sides_P2 != 1).any(1))
    if len(odd):
        chosen, rejected = sides_P2[odd[0]].tolist()
        raise ColumnError(
            f"the pair with pair_id {ids_P[odd[0]]} has {chosen} chosen and {rejected} rejected responses; expected one of each",
            hint="give both samples of a pair the same pair_id; set chosen = true for the preferred one only",
        )
    rows_N = np.argsort(pair_N, kind="stable")
    return rows_N[chosen_N[rows_N]], rows_N[~chosen_N[rows_N]]
