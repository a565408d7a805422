"""Counter-based sampling noise: a pure function of the sample's key, the token's offset and the vocabulary index.

Legend: N rows, M token offsets, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 divided by the golden ratio: the increment of SplitMix64 (Steele, Lea and Flood, 2014)."""


def stream_seeds(keys_N2: Tensor, offsets_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a 64-bit seed for each token, from the sample's key and the token's offset.

    Args:
        keys_N2: int64 [N, 2], the key of each row's sample (`SampleStream.key()`).
        offsets_NM: int64 [N, M], the tokens' offsets in their responses.

    Returns:
        The low and high halves of the seeds, int32 [N, M] each.
    """
    hashed = _mix64(offsets_NM * _GOLDEN + keys_N2[:, :1])
    hashed = _mix64(hashed ^ keys_N2[:, 1:])
    halves = hashed.contiguous().view(torch.int32)
    return halves[:, 0::2].contiguous(), halves[:, 1::2].contiguous()


def log_exponential(low_N1: Tensor, high_N1: Tensor, vocabulary_V: Tensor) -> Tensor:
    """Return the logarithm of standard exponential noise, one value per row and vocabulary index.

    The negative noise is Gumbel noise: argmax(log p − noise) is a sample from p (Gumbel, 1954).

    Args:
        low_N1: int32 [N, 1], the low half of each row's seed.
        high_N1: int32 [N, 1], the high half of each row's seed.
        vocabulary_V: int32 [V], the result of `vocabulary_counters`.

    Returns:
        float32 [N, V], in [−22.2, 2.9], finite.
    """
    # Multipliers and shifts of a 32-bit finaliser with low bias (Wellons, hash-prospector); the
    # second half of the seed enters between the rounds.
    x = vocabulary_V + low_N1
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= high_N1
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    x >>= 1
    x &= 0x7FFFFFFF
    # float32 is most precise for small uniforms, which here make the largest Gumbel values.
    uniform = x.to(torch.float32).add_(0.5).mul_(-(2.0**-31)).clamp_(min=-1 + 2.0**-24)
    return uniform.log1p_().neg_().log_()


def vocabulary_counters(size: int, device: torch.device) -> Tensor:
    """Return a distinct, well-spread counter for each vocabulary index, int32 [V]."""
    index_V = torch.arange(size, dtype=torch.int32, device=device)
    return index_V * (0x9E3779B1 - (1 << 32))


def _mix64(x: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser to int64, with masks that make shifts logical."""
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
