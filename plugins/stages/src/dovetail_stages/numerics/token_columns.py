"""Columns of a batch as tensors over response tokens. N samples, T response tokens, packed end to end."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError


def token_column(
    batch: Batch, name: str, mask: Ragged, mask_T: Bool[Tensor, "T"], like: Float[Tensor, "T"]
) -> Float[Tensor, "T *inner"]:
    """Return a column on the device and in the dtype of `like`, [T], or [T, …] where its values have a shape; a sample-level one is
    repeated over its tokens.

    Args:
        batch: N samples, with the column: ragged over response tokens, or dense, [N] or [N, …].
        name: of the column.
        mask: the batch's `response_mask`.
        mask_T: bool [T], the same as a tensor. Masked tokens hold 0, whatever the column says of them.
        like: float [T].

    Raises:
        ColumnError: the column does not line up with the mask, or holds no numbers.
    """
    values = batch[name]
    if isinstance(values, Ragged):
        if not np.array_equal(values.offsets, mask.offsets):
            raise ColumnError(
                f"column {name!r} does not line up with response_mask: it has {len(values.values)} values "
                f"over {len(values)} samples, the mask {len(mask.values)}",
                hint="one value a response token, or one a sample",
            )
        flat = values.values
    elif isinstance(values, np.ndarray):
        flat = np.repeat(values, mask.lengths, axis=0)
    else:
        raise ColumnError(
            f"column {name!r} is no number a token or a sample, so no loss can read it"
        )
    hidden_T = ~mask_T.reshape(-1, *(1,) * (flat.ndim - 1))
    return on_device(flat, like).to(like.dtype).masked_fill(hidden_T, 0)


def on_device(values: Shaped[np.ndarray, "K *inner"], like: Tensor) -> Shaped[Tensor, "K *inner"]:
    """Return an array [K] or [K, …] as a tensor of its own dtype on the device of `like`."""
    # Arrays that came over the wire are read-only, which torch takes badly.
    tensor = torch.from_numpy(np.require(values, requirements=["C", "W"]))
    if like.device.type == "cpu":
        return tensor
    # Memory that is not pinned would be sent only once the device has caught up, and the host would wait for it.
    return tensor.pin_memory().to(like.device, non_blocking=True)
