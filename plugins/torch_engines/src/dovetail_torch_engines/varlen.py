"""Causal attention over sequences packed end to end, with the fastest kernel that the device has.

On CUDA in half precision, one call of the variable-length flash kernel computes all sequences. `scaled_dot_product_attention`
computes sequences of equal length and sequences long enough to fill the device. In other cases only the attention's inputs are
padded: sequences of similar length share a bucket.

    out_t = Σ_s softmax_s(scale · q_t · k_s) v_s        over s ≤ t of t's sequence, and s > t − window

Legend: T tokens, H query heads, K key and value heads (K divides H), D head size, E head size of the values,
S sequences, B sequences of a bucket, L their padded length, W window, N padded tokens of all buckets.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from dovetail_torch_engines.sequences import Sequences

HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
"""Largest head size that the flash kernels support; sizes must be multiples of 8."""
ALONE = 4096
"""Mean length from which one sequence fills a GPU, so that one kernel call for each sequence is faster. On an H200, cuDNN's kernel
reaches 370 TFLOP/s forward and backward at 16k and 64k tokens; the variable-length flash kernel reaches 230 to 250."""
STEP = 256
"""If each sequence has a kernel call of its own, its length is padded to a multiple of this. A length from 8192 on is padded to a multiple
of a sixteenth of the largest power of two within it, so that few distinct lengths occur."""
DENSE_WINDOW = 2
"""A bucket at most this number of windows long is computed with a full mask; a longer one in blocks of one window."""


def attend(
    query_THD: Float[Tensor, "T H D"],
    key_TKD: Float[Tensor, "T K D"],
    value_TKE: Float[Tensor, "T K E"],
    sequences: Sequences,
    *,
    scale: float,
    window: int | None = None,
) -> Float[Tensor, "T H E"]:
    """Return causal attention within each sequence; differentiable.

    Args:
        query_THD: float [T, H, D], T tokens with H heads.
        key_TKD: float [T, K, D], K key and value heads.
        value_TKE: float [T, K, E].
        sequences: the boundaries of the sequences; their lengths add up to T.
        scale: the factor of the products of queries and keys.
        window: the number of tokens that each token sees, itself included; None for no limit.

    Returns:
        float [T, H, E].
    """
    if window is not None and window >= sequences.longest:
        window = None
    flash = has_flash(query_THD, value_TKE)
    # cuDNN plans a kernel for every new length, so that `_one_by_one` pads a single sequence to one of a few lengths.
    if window is None and sequences.even and not (flash and len(sequences) == 1):
        return _rows(query_THD, key_TKD, value_TKE, len(sequences), scale)
    if window is None and flash and len(query_THD) >= ALONE * len(sequences):
        return _one_by_one(query_THD, key_TKD, value_TKE, sequences, scale)
    if flash:
        return _flash(query_THD, key_TKD, value_TKE, sequences, scale, window)
    return _padded(query_THD, key_TKD, value_TKE, sequences, scale, window)


def has_flash(query_THD: Tensor, value_TKE: Tensor) -> bool:
    """Return whether the variable-length flash kernel supports these tensors."""
    sizes = (query_THD.shape[-1], value_TKE.shape[-1])
    fits = max(sizes) <= LARGEST_HEAD and not any(size % 8 for size in sizes)
    return query_THD.is_cuda and query_THD.dtype in HALF and fits


def _flash(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKE: Tensor,
    sequences: Sequences,
    scale: float,
    window: int | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if (narrow := value_TKE.shape[-1]) != query_THD.shape[-1]:
        value_TKE = functional.pad(value_TKE, (0, query_THD.shape[-1] - narrow))
    # Grouped-query attention: torch 2.11 allows it without the option `enable_gqa`, later versions need the option.
    options: dict[str, Any] = {"enable_gqa": True} if _asks_for_consent() else {}
    offsets_S1, longest = sequences.offsets_S1, sequences.longest
    attended: Any = varlen_attn(
        query_THD, key_TKD, value_TKE, offsets_S1, offsets_S1, longest, longest,
        scale=scale, window_size=(-1 if window is None else window - 1, 0), **options,
    )  # fmt: skip
    return attended[..., :narrow]


@cache
def _asks_for_consent() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _rows(
    query_THD: Tensor, key_TKD: Tensor, value_TKE: Tensor, count: int, scale: float
) -> Tensor:
    """Attend within `count` sequences of equal length, which need no padding to be the rows of one tensor."""
    query, key, value = (
        torch.unflatten(x, 0, (count, -1)) for x in (query_THD, key_TKD, value_TKE)
    )
    with _fast_kernels(query_THD):
        return _causal(query, key, value, scale).flatten(0, 1)


def _one_by_one(
    query_THD: Tensor, key_TKD: Tensor, value_TKE: Tensor, sequences: Sequences, scale: float
) -> Tensor:
    """Attend within each sequence by a kernel call of its own.

    Sequences are padded to few distinct lengths (see `STEP`), since cuDNN makes a new plan for each length.
    """
    lengths = sequences.lengths
    attended = []
    with _fast_kernels(query_THD):
        states = (query_THD, key_TKD, value_TKE)
        for part in zip(*(torch.split(x, lengths) for x in states), strict=True):
            length = len(part[0])
            more = -length % max(STEP, (1 << length.bit_length()) // 32)
            q, k, v = (functional.pad(x, (0, 0, 0, 0, 0, more))[None] for x in part)
            attended.append(_causal(q, k, v, scale)[0, :length])
    return torch.cat(attended)


def _fast_kernels(query_THD: Tensor) -> AbstractContextManager[Any]:
    """Prefer cuDNN's kernel on CUDA within the block: on Hopper it is faster than torch's flash kernel."""
    if not query_THD.is_cuda:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order, set_priority=True)


def _causal(
    query_BLHD: Tensor, key_BLKD: Tensor, value_BLKE: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Return the attention's output [B, L, H, E], causal unless a mask is given."""
    attended_BHLE: Tensor = functional.scaled_dot_product_attention(
        query_BLHD.transpose(1, 2),
        key_BLKD.transpose(1, 2),
        value_BLKE.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query_BLHD.shape[2] != key_BLKD.shape[2],
    )
    return attended_BHLE.transpose(1, 2)


def _padded(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKE: Tensor,
    sequences: Sequences,
    scale: float,
    window: int | None,
) -> Tensor:
    buckets = sequences.buckets
    spread = [buckets.spread(x) for x in (query_THD, key_TKD, value_TKE)]
    attended = [
        _bucket(q, k, v, scale, window).flatten(0, 1) for q, k, v in zip(*spread, strict=True)
    ]
    return buckets.gathered(attended[0] if len(attended) == 1 else torch.cat(attended))


def _bucket(
    query_BLHD: Tensor, key_BLKD: Tensor, value_BLKE: Tensor, scale: float, window: int | None
) -> Tensor:
    length = query_BLHD.shape[1]
    if window is None or window >= length:
        return _causal(query_BLHD, key_BLKD, value_BLKE, scale)
    if length <= DENSE_WINDOW * window:
        mask_LL = query_BLHD.new_ones(length, length, dtype=torch.bool).tril()
        return _causal(query_BLHD, key_BLKD, value_BLKE, scale, mask_LL.triu(1 - window))
    return _banded(query_BLHD, key_BLKD, value_BLKE, scale, window)


def _banded(
    query_BLHD: Tensor, key_BLKD: Tensor, value_BLKE: Tensor, scale: float, window: int
) -> Tensor:
    """Attend within a window, in blocks of W queries to their own and the previous block: memory grows with L · W, not L²."""
    length = query_BLHD.shape[1]
    blocks = -(-length // window)
    more = blocks * window - length
    query = torch.unflatten(functional.pad(query_BLHD, (0, 0, 0, 0, 0, more)), 1, (blocks, window))
    key, value = (
        _with_block_before(
            torch.unflatten(functional.pad(x, (0, 0, 0, 0, 0, more)), 1, (blocks, window))
        )
        for x in (key_BLKD, value_BLKE)
    )
    at_query = torch.arange(window, device=query.device)[:, None] + window
    at_key = torch.arange(2 * window, device=query.device)
    band = (at_key <= at_query) & (at_key > at_query - window)
    # The block before the first one is padding.
    first = band & (at_key >= window)
    mask = torch.cat([first[None], band.expand(blocks - 1, -1, -1)])
    rows = len(query_BLHD)
    attended = _causal(
        query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), scale,
        mask.repeat(rows, 1, 1)[:, None],
    )  # fmt: skip
    return torch.unflatten(attended, 0, (rows, blocks)).flatten(1, 2)[:, :length]


def _with_block_before(blocks: Tensor) -> Tensor:
    """Prepend the previous block to each: [B, blocks, W, K, D] becomes [B, blocks, 2 W, K, D]."""
    before = functional.pad(blocks, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]
    return torch.cat([before, blocks], dim=2)
