"""The attention of packed micro-batches, as a custom attention function of transformers.

A model whose attention function is `PACKED` builds no mask. It passes queries, keys and values to `packed_attention`, together with
the `AttentionPack` that the caller passed as `pack`.
Legend: F tokens of the pack, H query heads, K key and value heads, D head size, E head size of the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor, nn

from dovetail_torch_engines import Sequences, attend, to_heads, to_tokens
from dovetail_train_fsdp2.shared_prompts import attend_shared
from dovetail_train_fsdp2.ulysses import SequenceParallel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKED = "dovetail_packed"
"""The name under which `packed_attention` is registered with transformers."""


@attrs.frozen(kw_only=True, eq=False)
class AttentionPack:
    """The boundaries of a packed micro-batch's sequences, as attention needs them."""

    sequences: Sequences
    """The boundaries of all sequences in the pack."""
    prompts: Sequences | None = None
    """The boundaries of the prompts, which precede the responses; None if each sequence is a sample."""
    responses: Sequences | None = None
    """One sequence for each prompt: all responses to the prompt, end to end. None if `prompts` is None."""
    parallel: SequenceParallel | None = None
    """The ranks among which the pack's tokens are divided; None if this rank holds all tokens."""


def packed_attention(
    module: nn.Module,  # noqa: ARG001 - transformers' signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    pack: AttentionPack,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Return attention of one layer over a pack.

    Args:
        module: the layer; `probing` has checked that it needs no other arguments.
        query: float [1, H, F, D], H heads and F tokens, with rotary positions applied; only this rank's tokens if the pack is
            divided among ranks.
        key: float [1, K, F, D], with rotary positions applied.
        value: float [1, K, F, E].
        attention_mask: unused, None.
        pack: the sequences; tokens attend within a sequence, and responses also to their prompt.
        scaling: the factor of the products of queries and keys; None means 1/√D.
        sliding_window: the number of tokens that each token sees, itself included; None for no limit.

    Returns:
        float [1, F, H, E], and None in place of attention weights.
    """
    parallel = pack.parallel
    states = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    query_FHD, key_FKD, value_FKE = (
        states if parallel is None else to_heads(*states, parallel.group)
    )
    attended_FHE = _attended(
        query_FHD,
        key_FKD,
        value_FKE,
        pack,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
    )
    if parallel is not None:
        attended_FHE = to_tokens(attended_FHE, parallel.group)
    return attended_FHE[None], None


def _attended(
    query_FHD: Tensor,
    key_FKD: Tensor,
    value_FKE: Tensor,
    pack: AttentionPack,
    scale: float,
    window: int | None,
) -> Tensor:
    device = query_FHD.device.type
    # The kernels need equal dtypes, and are called below the level at which autocast converts tensors.
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else value_FKE.dtype
    states = (query_FHD.to(dtype), key_FKD.to(dtype), value_FKE.to(dtype))
    if pack.prompts is None or pack.responses is None:
        return attend(*states, pack.sequences, scale=scale, window=window)
    return attend_shared(*states, pack.sequences, pack.prompts, pack.responses, scale=scale)


def register(name: str, attention: object, mask: object = None) -> None:
    """Register an attention function and its mask function with transformers; by default there is no mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)


def attend_by(model: PreTrainedModel, name: str) -> None:
    """Set the attention function of a model, by the function's registered name.

    The function stays set until the next call, since layers that are recomputed in the backward pass look up the name again.
    """
    config = model.config
    if config._attn_implementation != name:  # noqa: SLF001 - no public name
        config._attn_implementation = name  # noqa: SLF001


@contextmanager
def attending_by(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Set the attention function of a model within the block, by the function's registered name."""
    before = model.config._attn_implementation  # noqa: SLF001 - no public name
    attend_by(model, name)
    try:
        yield
    finally:
        attend_by(model, before)


@cache
def make_known() -> None:
    """Register `packed_attention` with transformers. Importing transformers is delayed until this call."""
    register(PACKED, packed_attention)
