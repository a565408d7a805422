"""A digest of each tensor's bytes, computed where the tensor is: the proof that weights arrived as they were sent.

The bytes are read as 32-bit words w_i, each multiplied by a pseudo-random odd 64-bit number and
summed modulo 2^64, block by block (multilinear hashing: Lemire and Kaser, "Strongly universal string
hashing is fast", 2014); the block sums are mixed with their positions and summed again. Integer sums
do not depend on the order in which a device adds: a CPU and an accelerator agree to the bit. One flipped
bit always changes the digest; exchanged words do but for one chance in 2^32 or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_BLOCK = 1 << 16
"""Words a block."""
_BLOCKS_AT_ONCE = 64
"""Blocks that are widened to 64 bits at once: 32 MiB."""
_MASK = (1 << 64) - 1


def tensor_digests(tensors: Sequence[Tensor]) -> list[int]:
    """Digest several tensors with one transfer from their device.

    Args:
        tensors: of any shape and dtype, all on one device.

    Returns:
        An integer below 2^64 for each. It depends on the bytes alone, not on shape or dtype.
    """
    if not tensors:
        return []
    sums = torch.stack([_word_sum(tensor) for tensor in tensors]).tolist()
    lengths = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return [
        _mix((value + length * 0x9E3779B97F4A7C15) & _MASK)
        for value, length in zip(sums, lengths, strict=True)
    ]


def _word_sum(tensor: Tensor) -> Tensor:
    """int64 []: the digest before the length is mixed in, on the tensor's device."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    words = _words(tensor.detach())
    keys_B, full = _keys(words.device), len(words) // _BLOCK
    parts = []
    for first in range(0, full, _BLOCKS_AT_ONCE):
        last = min(first + _BLOCKS_AT_ONCE, full)
        blocks = words[first * _BLOCK : last * _BLOCK].view(-1, _BLOCK)
        parts.append((blocks.to(torch.int64) * keys_B).sum(-1))
    rest = words[full * _BLOCK :]
    if len(rest):
        parts.append((rest.to(torch.int64) * keys_B[: len(rest)]).sum(-1, keepdim=True))
    sums = torch.cat(parts) if len(parts) > 1 else parts[0]
    positions = torch.arange(1, len(sums) + 1, device=sums.device)
    return _mix_tensor(sums ^ _mix_tensor(positions)).sum()


def _words(tensor: Tensor) -> Tensor:
    """int32 [words]: the tensor's bytes, filled up with zeros to a whole word."""
    octets = tensor.contiguous().reshape(-1).view(torch.uint8)
    missing = -len(octets) % 4
    if missing or octets.storage_offset() % 4:
        octets = torch.cat([octets, octets.new_zeros(missing)])
    return octets.view(torch.int32)


@lru_cache(maxsize=16)
def _keys(device: torch.device) -> Tensor:
    """int64 [block]: pseudo-random odd multipliers."""
    return _mix_tensor(torch.arange(1, _BLOCK + 1, dtype=torch.int64, device=device)) | 1


def _mix_tensor(x: Tensor) -> Tensor:
    """SplitMix64 (Steele, Lea and Flood, 2014) on int64, its shifts made logical by masks."""
    x = x * (0x9E3779B97F4A7C15 - (1 << 64))
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * (0x94D049BB133111EB - (1 << 64))
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix(x: int) -> int:
    """The same finaliser on a Python integer below 2^64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
