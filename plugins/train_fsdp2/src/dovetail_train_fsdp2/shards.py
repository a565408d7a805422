"""Tensors that may be sharded over ranks (DTensor): reading and filling this rank's shard, and gathering the whole tensor.

A tensor that is not sharded counts as its only shard, so that callers need not distinguish.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dovetail_train_fsdp2.quantised import dequantised

BLOCK_BYTES = 2**27
"""Bytes of tensors that are gathered at once."""


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, [rows of this rank, …] of [rows, …], sharing the tensor's memory; outside autograd."""
    shard = tensor.detach()
    return shard.to_local() if isinstance(shard, DTensor) else shard


def rows_here(tensor: Tensor) -> tuple[int, int]:
    """Return the first row (inclusive) and the last row (exclusive) of this rank's shard of a tensor [rows, …]."""
    rows = tensor.shape[0]
    if not isinstance(tensor, DTensor):
        return 0, rows
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return (offset[0], offset[0] + shape[0]) if shape[0] else (rows, rows)


@torch.no_grad()
def fill(tensor: Tensor, read: Callable[[int, int], Tensor]) -> None:
    """Write this rank's shard in place, from rows of the whole tensor.

    Args:
        tensor: the tensor, changed in place; of any number of dimensions.
        read: a function that returns rows `first` to `last` (exclusive) of the whole tensor, [last − first, …], of any dtype and
            device; called at most once.
    """
    if not tensor.dim():
        tensor.copy_(read(0, 1).reshape(()))
        return
    first, last = rows_here(tensor)
    if last > first:
        local(tensor).copy_(read(first, last))


def whole(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return the whole tensor, in its unsharded shape, outside autograd; a quantised tensor is dequantised.

    Collective for a sharded tensor: every rank of the tensor's mesh must call this function.

    Args:
        tensor: any tensor.
        device: the device of gathering and of the result; by default the tensor's device.
    """
    tensor = dequantised(tensor)
    here = tensor.detach() if device is None else tensor.detach().to(device)
    if isinstance(here, DTensor) and here.device_mesh.size() > 1:
        return here.full_tensor()
    return local(here)


@torch.no_grad()
def wholes(
    tensors: Iterable[tuple[str, Tensor]],
    device: torch.device,
    cast: Callable[[Tensor], torch.dtype],
) -> Iterator[tuple[str, Tensor]]:
    """Gather tensors, sharded or not, several at once, outside autograd. Collective: every rank must iterate over all of them.

    One collective carries several tensors, since one collective per tensor would be slow. Shards are cast before they are gathered.

    Args:
        tensors: names and tensors, the same on every rank.
        device: the device of gathering and of the results.
        cast: a function that returns the dtype in which to gather a tensor.

    Yields:
        Each tensor's name and the whole tensor, in its unsharded shape.
    """
    block: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        size += tensor.numel() * cast(tensor).itemsize
        if block and size > BLOCK_BYTES:
            yield from _gathered(block, device, cast)
            block, size = [], tensor.numel() * cast(tensor).itemsize
        block.append((name, tensor))
    yield from _gathered(block, device, cast)


def _gathered(
    block: list[tuple[str, Tensor]],
    device: torch.device,
    cast: Callable[[Tensor], torch.dtype],
) -> Iterator[tuple[str, Tensor]]:
    """Gather the tensors of a block by one collective for every dtype."""
    found: dict[str, Tensor] = {}
    spread: dict[torch.dtype, list[tuple[str, DTensor]]] = {}
    for name, tensor in block:
        if isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1 and tensor.dim():
            spread.setdefault(cast(tensor), []).append((name, tensor))
        else:
            found[name] = whole(tensor, device).to(cast(tensor))
    for dtype, parts in spread.items():
        # The mesh's last dimension divides tensors; the others replicate the shards.
        mesh = parts[0][1].device_mesh
        group, ranks = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        rows = [-(-tensor.shape[0] // ranks) for _, tensor in parts]
        sizes = [
            r * math.prod(tensor.shape[1:]) for r, (_, tensor) in zip(rows, parts, strict=True)
        ]
        mine = torch.zeros(sum(sizes), dtype=dtype, device=device)
        for own, (_, tensor) in zip(torch.split(mine, sizes), parts, strict=True):
            shard = local(tensor).reshape(-1)
            own[: len(shard)].copy_(shard)
        all_of_them = torch.empty(ranks, len(mine), dtype=dtype, device=device)
        dist.all_gather_into_tensor(all_of_them.view(-1), mine, group=group)
        for (name, tensor), part in zip(parts, torch.split(all_of_them, sizes, dim=1), strict=True):
            # The last ranks' shards may be shorter, or empty.
            found[name] = part.reshape(-1, *tensor.shape[1:])[: tensor.shape[0]]
    yield from ((name, found[name]) for name, _ in block)
