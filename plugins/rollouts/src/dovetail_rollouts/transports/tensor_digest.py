"""A digest of each tensor's bytes, computed on the tensor's device, to verify that weights arrived as they were sent.

The bytes are read as 32-bit words w_i, each multiplied by a pseudo-random odd 64-bit number and
summed modulo 2^64, block by block (multilinear hashing: Lemire and Kaser, "Strongly universal string
hashing is fast", 2014); the block sums are mixed with their positions and summed again. Integer sums
do not depend on the order in which a device adds: a CPU and an accelerator agree to the bit. One flipped
bit always changes the digest; exchanged words leave it unchanged with a chance of at most 2^-32.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_BLOCK = 1 << 16
"""Number of words in a block."""
_BLOCKS_A_THREAD = 8
"""Minimum number of blocks for each CPU thread: 2 MiB."""
_MOST_THREADS = 8
_STEP = np.uint64(0x9E3779B97F4A7C15)


def tensor_digests(tensors: Sequence[Tensor]) -> list[int]:
    """Digest several tensors with one transfer from their device.

    Args:
        tensors: tensors of any shape and dtype.

    Returns:
        An integer below 2^64 for each tensor, which depends on the bytes alone, not on shape or dtype.
    """
    digests = DeferredDigests()
    for tensor in tensors:
        digests.add(tensor)
    return digests.result()


class DeferredDigests:
    """Digests that are computed on each tensor's device, and copied to the host together."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._waiting: list[Tensor] = []
        self._sums: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        """Add a tensor of any shape and dtype, which is kept until `launch`, so that many tensors share one kernel launch."""
        self._lengths.append(tensor.nbytes)
        if self._waiting and self._waiting[-1].device != tensor.device:
            self.launch()
        self._waiting.append(tensor)
        if tensor.is_cpu:
            self.launch()

    def launch(self) -> None:
        """Queue the digests of the tensors since the last launch, on the current stream, and release those tensors."""
        if self._waiting:
            self._sums.append(_word_sums(self._waiting))
            self._waiting = []

    def result(self) -> list[int]:
        """Return the digests in the order of the tensors: integers below 2^64."""
        self.launch()
        if not self._sums:
            return []
        one_device = len({sums.device for sums in self._sums}) == 1
        sums_N = torch.cat(self._sums if one_device else [sums.cpu() for sums in self._sums])
        lengths_N = np.array(self._lengths, dtype=np.uint64)
        values_N = sums_N.cpu().numpy().view(np.uint64) + lengths_N * _STEP
        return [int(digest) for digest in _mix_words(values_N)]


def _word_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digests of N tensors on one device, before their lengths are mixed in, int64 [N]."""
    device = tensors[0].device
    kernel = _kernel(device.type)
    if kernel is None:
        return torch.stack([_word_sum(tensor) for tensor in tensors])
    return kernel([tensor.contiguous() for tensor in tensors], _keys(device))


@lru_cache(maxsize=4)
def _kernel(device_type: str) -> Callable[[Sequence[Tensor], Tensor], Tensor] | None:
    """Return the fused kernel; None if Triton does not compile for this type of device."""
    if device_type == "cpu":
        return None
    try:
        from triton.runtime import driver

        if driver.active.get_active_torch_device().type != device_type:
            return None
        from dovetail_rollouts.transports.word_sums import word_sums
    except (ImportError, RuntimeError, AttributeError):
        return None  # no Triton, or no driver for the device
    return word_sums


def _word_sum(tensor: Tensor) -> Tensor:
    """Return a tensor's digest before its length is mixed in, computed on the CPU, int64 []."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64)
    sums = _sums_of_blocks(_words(tensor.detach()).cpu())
    positions = torch.arange(1, len(sums) + 1)
    return _mix_tensor(sums ^ _mix_tensor(positions)).sum()


def _sums_of_blocks(words: Tensor) -> Tensor:
    """Return the sum of each block of a tensor's words, int64 [blocks]; the last block may be short."""
    words_W = words.numpy()
    full = len(words_W) // _BLOCK
    blocks = words_W[: full * _BLOCK].reshape(-1, _BLOCK)
    rest = words_W[full * _BLOCK :]
    threads = min(torch.get_num_threads(), full // _BLOCKS_A_THREAD, _MOST_THREADS)
    if threads > 1:
        parts = list(_pool(os.getpid()).map(_block_sums, np.array_split(blocks, threads)))
    else:
        parts = [_block_sums(blocks)]
    if len(rest):
        parts.append(_block_sums(rest[np.newaxis]))
    return torch.from_numpy(np.concatenate(parts))


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:  # noqa: ARG001 - what the cache goes by
    """Return the thread pool of this process.

    The process id is the key of the cache: a forked process has none of its parent's threads, and needs a new pool.
    """
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="digest")


def _block_sums(blocks: np.ndarray) -> np.ndarray:
    """Return the sums modulo 2^64 of int32 words times their keys, int64 [blocks]; `einsum` makes no widened copy of the words."""
    keys = _keys(torch.device("cpu")).numpy()[: blocks.shape[1]]
    return np.asarray(np.einsum("kb,b->k", blocks, keys, dtype=np.int64, casting="safe"))


def _words(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes as words, int32 [words], padded with zeros to a whole word."""
    octets = tensor.contiguous().reshape(-1).view(torch.uint8)
    missing = -len(octets) % 4
    if missing or octets.storage_offset() % 4:
        octets = torch.cat([octets, octets.new_zeros(missing)])
    return octets.view(torch.int32)


@lru_cache(maxsize=16)
def _keys(device: torch.device) -> Tensor:
    """Return the pseudo-random odd multipliers of a block, int64 [block]."""
    return _mix_tensor(torch.arange(1, _BLOCK + 1, dtype=torch.int64, device=device)) | 1


def _mix_tensor(x: Tensor) -> Tensor:
    """Mix int64 values by SplitMix64 (Steele, Lea and Flood, 2014); masks make the right shifts logical."""
    x = x * (0x9E3779B97F4A7C15 - (1 << 64))
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * (0x94D049BB133111EB - (1 << 64))
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix_words(x: np.ndarray) -> np.ndarray:
    """Mix uint64 values by the finaliser of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
