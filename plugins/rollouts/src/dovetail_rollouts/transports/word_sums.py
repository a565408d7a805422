"""Digests of many tensors in one launch, and one pass over their bytes: a Triton kernel for accelerators.

Triton comes with torch's builds for accelerators. Without Triton, `transports/tensor_digest.py` computes the same digests with torch's
own operations, which read and write eight further bytes for every four bytes of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import no_type_check

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
"""Number of words that a Triton program loads at once."""
_WARPS = 8
_ALIGNMENT = 16
"""Number of bytes of a thread's widest load."""


def word_sums(tensors: Sequence[Tensor], keys_B: Tensor) -> Tensor:
    """Return the digests of N tensors before the tensors' lengths are mixed in, int64 [N], queued on the current stream.

    Args:
        tensors: N contiguous tensors on one device, of any shape and dtype; tensors not aligned to 16 bytes are copied.
        keys_B: int64 [B], the multipliers of a block of B words, on the same device.
    """
    device, block_bytes = keys_B.device, len(keys_B) * 4
    sums_N = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    # The table below holds only addresses, so the copies must stay alive until the kernel is queued.
    kept = [
        tensor.detach().clone() if tensor.data_ptr() % _ALIGNMENT else tensor for tensor in tensors
    ]
    table_P4 = _table([(tensor.data_ptr(), tensor.nbytes) for tensor in kept], block_bytes)
    if not len(table_P4):
        return sums_N
    table = torch.from_numpy(table_P4)
    if device.type != "cpu":
        table = table.pin_memory().to(device, non_blocking=True)
    # Triton launches on the current device, which may differ from the tensors' device. The CPU is used
    # only in tests, under Triton's interpreter.
    with nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index):
        _sum_blocks[(len(table_P4),)](
            table, keys_B, sums_N, BLOCK=len(keys_B), TILE=min(_TILE, len(keys_B)), num_warps=_WARPS
        )
    return sums_N


def _table(spans: Sequence[tuple[int, int]], block_bytes: int) -> np.ndarray:
    """Divide tensors into P blocks, and return a row for each, int64 [P, 4].

    A row has the block's address, its size in bytes, its position in its tensor (counted from 1), and the index of the tensor.

    Args:
        spans: the address and the size in bytes of each tensor.
        block_bytes: the size of a block; the last block of a tensor may be smaller.
    """
    address_N = np.array([address for address, _ in spans], dtype=np.int64)
    bytes_N = np.array([size for _, size in spans], dtype=np.int64)
    blocks_N = -(-bytes_N // block_bytes)
    owner_P = np.repeat(np.arange(len(spans)), blocks_N)
    first_N = np.cumsum(blocks_N) - blocks_N
    index_P = np.arange(len(owner_P)) - first_N[owner_P]
    start_P = index_P * block_bytes
    size_P = np.minimum(bytes_N[owner_P] - start_P, block_bytes)
    table_P4 = np.stack([address_N[owner_P] + start_P, size_P, index_P + 1, owner_P], axis=1)
    return np.ascontiguousarray(table_P4, dtype=np.int64)


@triton.jit
@no_type_check
def _mix(x):
    """Mix uint64 values by SplitMix64."""
    x = x * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


# Types are not checked: Triton compiles the function itself, and the wrapper that jaxtyping adds in tests does not know `tl`.
@triton.jit
@no_type_check
def _sum_blocks(table, keys, sums, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Add the digest of one block to its tensor's sum: the words times their keys, summed, and mixed with the block's position.

    Args:
        table: the rows that `_table` returns, one for each program.
        keys: the multipliers of a block's words, int64 [BLOCK].
        sums: the sum of each tensor, int64 [N], to which the program adds.
        BLOCK: number of words of a block.
        TILE: number of words that the program loads at once.
    """
    row = table + tl.program_id(0).to(tl.int64) * 4
    address = tl.multiple_of(tl.load(row), 16)
    size = tl.load(row + 1)
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    tile = tl.arange(0, TILE)
    total = tl.zeros([TILE], dtype=tl.int64)
    if size == BLOCK * 4:  # loads without a mask are as wide as possible
        for at in range(0, BLOCK, TILE):
            total += tl.load(words + at + tile).to(tl.int64) * tl.load(keys + at + tile)
    else:
        count = size // 4
        for first in range(0, count, TILE):
            here = first + tile < count
            word = tl.load(words + first + tile, mask=here, other=0).to(tl.int64)
            total += word * tl.load(keys + first + tile, mask=here, other=0)
        # A last word of fewer than four bytes is padded with zeros.
        octets = address.to(tl.pointer_type(tl.uint8)) + count * 4
        lane = tl.arange(0, 4)
        octet = tl.load(octets + lane, mask=lane < size % 4, other=0).to(tl.int64)
        last = tl.sum(octet << (lane * 8).to(tl.int64), 0)
        key = tl.load(keys + count, mask=size % 4 > 0, other=0)
        total += tl.where(tile == 0, last * key, 0)
    mixed = tl.sum(total, 0).to(tl.uint64) ^ _mix(tl.load(row + 2).to(tl.uint64))
    # Relaxed: no program reads the sums, and integer sums are the same in any order.
    tl.atomic_add(sums + tl.load(row + 3), _mix(mixed).to(tl.int64), sem="relaxed")
