"""Attention over packs that hold each prompt once: a response attends to itself, and to the prompt that it shares.

Prompts come first, then all responses; responses to one prompt are adjacent. One causal call computes attention within every
sequence. A second call, without a mask, computes attention of responses to their prompt. The two outputs, weighted by their sums of
exponentials, give the softmax over both sets of keys:

    l = log(e^l₁ + e^l₂)        o = e^(l₁ − l) o₁ + e^(l₂ − l) o₂

The gradient is exact: each call's backward pass uses o and l of the whole softmax instead of that call's.

Legend: F tokens of the pack, P tokens of prompts, Q tokens of responses, G prompts, H query heads, K key and value heads, D head
size, E head size of the values.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from dovetail_torch_engines import Sequences
from dovetail_train_fsdp2.partial import Spans, partial, partial_backward


def attend_shared(
    query_FHD: Float[Tensor, "F H D"],
    key_FKD: Float[Tensor, "F K D"],
    value_FKE: Float[Tensor, "F K E"],
    sequences: Sequences,
    prompts: Sequences,
    responses: Sequences,
    *,
    scale: float,
) -> Float[Tensor, "F H E"]:
    """Return causal attention within each sequence, and of each response to its whole prompt; differentiable.

    Args:
        query_FHD: float [F, H, D].
        key_FKD: float [F, K, D].
        value_FKE: float [F, K, E], with E ≤ D.
        sequences: the boundaries of all sequences, the G prompts first.
        prompts: the boundaries of the G prompts, P tokens in total.
        responses: one sequence for each prompt: all responses to the prompt, end to end; Q tokens in total.
        scale: the factor of the products of queries and keys.

    Returns:
        float [F, H, E].
    """
    size, narrow = query_FHD.shape[-1], value_FKE.shape[-1]
    value_FKD = functional.pad(value_FKE, (0, size - narrow)) if narrow < size else value_FKE
    own = Spans(queries=sequences, keys=sequences, causal=True)
    across = Spans(queries=responses, keys=prompts, causal=False)
    attended: Tensor = _Shared.apply(  # type: ignore[no-untyped-call]
        query_FHD, key_FKD, value_FKD, own, across, sum(prompts.lengths), scale
    )
    return attended[..., :narrow]


class _Shared(torch.autograd.Function):
    """Autograd function of `attend_shared`: two attention calls, whose outputs are merged."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own: Spans,
        across: Spans,
        start: int,
        scale: float,
    ) -> Tensor:
        out_FHD, lse_HF = partial(query, key, value, own, scale)
        if start < len(query):
            of_prompts, other = partial(query[start:], key[:start], value[:start], across, scale)
            mine = lse_HF[:, start:]
            whole = torch.logaddexp(mine, other)
            merged = (
                out_FHD[start:] * _weight(mine, whole) + of_prompts * _weight(other, whole)
            ).to(query.dtype)
            out_FHD = torch.cat([out_FHD[:start], merged])
            lse_HF = torch.cat([lse_HF[:, :start], whole], dim=1)
        ctx.save_for_backward(query, key, value, out_FHD, lse_HF)
        ctx.own, ctx.across, ctx.start, ctx.scale = own, across, start, scale
        return out_FHD

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        start, grad = ctx.start, grad.contiguous()
        grads = partial_backward(grad, query, key, value, out, lse, ctx.own, ctx.scale)
        if start < len(query):
            of_prompts = partial_backward(
                grad[start:], query[start:], key[:start], value[:start], out[start:],
                lse[:, start:].contiguous(), ctx.across, ctx.scale,
            )  # fmt: skip
            grads[0][start:] += of_prompts[0]
            grads[1][:start] += of_prompts[1]
            grads[2][:start] += of_prompts[2]
        return *grads, None, None, None, None


def _weight(part_HQ: Tensor, whole_HQ: Tensor) -> Tensor:
    """Return the weight of one attention call's output, float32 [Q, H, 1]: e^(l₁ − l) for `part_HQ` = l₁ and `whole_HQ` = l."""
    return (part_HQ - whole_HQ).exp().t()[..., None]
