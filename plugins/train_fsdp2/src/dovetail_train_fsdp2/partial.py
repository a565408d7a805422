"""Partial attention, to some of a query's keys: the output, and the sum of exponentials to merge it with attention to the other keys.

Forward and backward are separate functions, since the gradient needs output and sums of the whole softmax. Both functions use the
variable-length flash kernel on CUDA in half precision, torch's flash kernel over padded batches on the CPU, and plain products
otherwise. With S = scale · Q Kᵀ, P = e^(S − l) and the whole softmax's output O and l:

    dV = Pᵀ dO        dS = P (dO Vᵀ − Σ dO · O)        dQ = scale · dS K        dK = scale · dSᵀ Q

Legend: T queries or keys, H query heads, K key and value heads, D head size, B sequences of a batch, L queries and M keys of
each.
"""

from __future__ import annotations

import math

import attrs
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from dovetail_torch_engines import Sequences, has_flash

aten = torch.ops.aten


@attrs.frozen(kw_only=True, eq=False)
class Spans:
    """Spans of queries and keys: the i-th span of queries attends to the i-th span of keys."""

    queries: Sequences
    keys: Sequences
    causal: bool
    """Whether each query attends only to keys up to its own position; queries and keys are then the same sequences."""


def partial(
    query_THD: Float[Tensor, "Tq H D"],
    key_TKD: Float[Tensor, "Tk K D"],
    value_TKD: Float[Tensor, "Tk K D"],
    spans: Spans,
    scale: float,
) -> tuple[Float[Tensor, "Tq H D"], Float32[Tensor, "H Tq"]]:
    """Return the attention of queries to their spans of keys alone, to be combined with their attention to other keys. Not differentiable.

    Returns:
        The output, [Tq, H, D], normalised over the span; and the log of each query's sum of exponentials, float32 [H, Tq], by which outputs
        are combined.
    """
    if has_flash(query_THD, value_TKD):
        out, lse, *_ = aten._flash_attention_forward(  # noqa: SLF001 - the only way to the sums
            query_THD, key_TKD, value_TKD, *_lengths(spans), 0.0, spans.causal, False, scale=scale
        )
        return out, lse
    outs, sums = [], []
    keys = _for_each_head(query_THD, key_TKD, value_TKD)
    for q, k, v in _batches(spans, [query_THD], keys):
        if not q.shape[2]:
            out, lse = q, q[..., 0].float()
        elif q.device.type == "cpu":
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
                q, k, v, 0.0, spans.causal, scale=scale
            )
        else:
            out, lse = _dense(q, k, v, spans.causal, scale)
        outs.append(out)
        sums.append(lse[..., None])
    queries = spans.queries
    return _end_to_end(queries, outs, spans), _end_to_end(queries, sums, spans)[..., 0].t()


def partial_backward(
    grad_THD: Float[Tensor, "Tq H D"],
    query_THD: Float[Tensor, "Tq H D"],
    key_TKD: Float[Tensor, "Tk K D"],
    value_TKD: Float[Tensor, "Tk K D"],
    out_THD: Float[Tensor, "Tq H D"],
    lse_HT: Float32[Tensor, "H Tq"],
    spans: Spans,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of queries [Tq, H, D], keys [Tk, K, D] and values [Tk, K, D], from output and log-sum-exp of the whole softmax."""
    if has_flash(query_THD, value_TKD):
        nothing = torch.empty(0, device=query_THD.device)
        seed = torch.zeros(2, dtype=torch.uint64, device=query_THD.device)
        dq, dk, dv = aten._flash_attention_backward(  # noqa: SLF001
            grad_THD, query_THD, key_TKD, value_TKD, out_THD, lse_HT, *_lengths(spans), 0.0,
            spans.causal, seed, nothing, scale=scale,
        )  # fmt: skip
        return dq, dk, dv
    found = []
    given = [grad_THD, query_THD, out_THD, lse_HT.t()[..., None]]
    keys = _for_each_head(query_THD, key_TKD, value_TKD)
    for g, q, o, lse, k, v in _batches(spans, given, keys):
        if not q.shape[2]:
            found.append((torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)))
        elif q.device.type == "cpu":
            found.append(
                aten._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001
                    g, q, k, v, o, lse[..., 0], 0.0, spans.causal, scale=scale
                )
            )
        else:
            found.append(_dense_backward(g, q, k, v, o, lse, spans.causal, scale))
    sides = (spans.queries, spans.keys, spans.keys)
    whole = [
        _end_to_end(side, list(parts), spans)
        for side, parts in zip(sides, zip(*found, strict=True), strict=True)
    ]
    # Gradients of query heads that share a key head are added.
    groups = (key_TKD.shape[1], -1)
    return (
        whole[0],
        torch.unflatten(whole[1], 1, groups).sum(2),
        torch.unflatten(whole[2], 1, groups).sum(2),
    )


def _lengths(spans: Spans) -> tuple[Tensor, Tensor, int, int]:
    queries, keys = spans.queries, spans.keys
    return queries.offsets_S1, keys.offsets_S1, queries.longest, keys.longest


def _dense(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores_BHLM = _scores(q, k, causal, scale)
    lse_BHL = scores_BHLM.logsumexp(-1)
    return ((scores_BHLM - lse_BHL[..., None]).exp() @ v.float()).to(q.dtype), lse_BHL


def _dense_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    g, q32, k32, v32, o = (x.float() for x in (g, q, k, v, o))
    pi_BHLM = (_scores(q, k, causal, scale) - lse).exp()
    grad_BHLM = pi_BHLM * (g @ v32.transpose(2, 3) - (g * o).sum(-1, keepdim=True)) * scale
    grads = (grad_BHLM @ k32, grad_BHLM.transpose(2, 3) @ q32, pi_BHLM.transpose(2, 3) @ g)
    dq, dk, dv = (x.to(q.dtype) for x in grads)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Return the scaled and masked scores, float32 [B, H, L, M]."""
    scores_BHLM = q.float() @ k.float().transpose(2, 3) * scale
    if causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores_BHLM = scores_BHLM.masked_fill(later, -math.inf)
    return scores_BHLM


def _for_each_head(query: Tensor, *keys: Tensor) -> list[Tensor]:
    return [x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in keys]


def _batches(spans: Spans, queries: list[Tensor], keys: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Divide tensors [T, H, D] into batches of sequences, and return for each batch the parts of all tensors, [B, H, L, D] each.

    A batch is a padded bucket of similar lengths if `spans.causal`, else a single span. The parts of `queries` come before those of `keys`.
    """
    sides = [(spans.queries, x) for x in queries] + [(spans.keys, x) for x in keys]
    if spans.causal:
        # Padding follows the sequence, where causal attention does not see it.
        lists = [side.buckets.spread(x) for side, x in sides]
    else:
        lists = [[part[None] for part in torch.split(x, side.lengths)] for side, x in sides]
    return list(zip(*([x.transpose(1, 2) for x in parts] for parts in lists), strict=True))


def _end_to_end(side: Sequences, parts: list[Tensor], spans: Spans) -> Tensor:
    """Join the parts of a tensor that `_batches` divided, and return the tensor [T, H, D]; `side` has the lengths of its sequences."""
    flat = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
    return side.buckets.gathered(flat) if spans.causal else flat
