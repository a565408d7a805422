"""Tensors that may be spread over ranks (DTensor): what of one lies here, how to fill it, how to have it whole.

A tensor that is not spread is its own only shard, so that callers need not ask.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dovetail_train_fsdp2.quantised import dequantised


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, [rows here, …] of [rows, …], which shares the tensor's memory; outside autograd."""
    shard = tensor.detach()
    return shard.to_local() if isinstance(shard, DTensor) else shard


def rows_here(tensor: Tensor) -> tuple[int, int]:
    """Return the first row of this rank's shard of a tensor [rows, …], and the one after its last."""
    rows = tensor.shape[0]
    if not isinstance(tensor, DTensor):
        return 0, rows
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return (offset[0], offset[0] + shape[0]) if shape[0] else (rows, rows)


@torch.no_grad()
def fill(tensor: Tensor, read: Callable[[int, int], Tensor]) -> None:
    """Write this rank's shard.

    Args:
        tensor: changed in place; of any number of dimensions.
        read: gives rows `first` to `last` (exclusive) of the whole, [last − first, …], of any dtype and device; called at
            most once.
    """
    if not tensor.dim():
        tensor.copy_(read(0, 1).reshape(()))
        return
    first, last = rows_here(tensor)
    if last > first:
        local(tensor).copy_(read(first, last))


def whole(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return the whole tensor, in the shape that it has over all shards, outside autograd. A quantised one comes as it is computed with. Collective where it is spread: every rank of its mesh must call it.

    Args:
        tensor: any.
        device: where to gather, and where the result lies; the tensor's own by default.
    """
    tensor = dequantised(tensor)
    here = tensor.detach() if device is None else tensor.detach().to(device)
    return here.full_tensor() if isinstance(here, DTensor) else here
