"""Triton kernels of the output layer: each reads a chunk of logits once. Imported only if triton is installed.

With z = (x + bias) / temperature for logits x, and p = softmax(z). Sums run online, under a maximum that grows:

    s = Σ e^(z − m)    t = Σ (z − m) e^(z − m)    log Σ e^z = m + log s    H = log s − t / s    Σ p² = Σ e^(2(z − m)) / s²

Legend: C rows of a chunk, V vocabulary.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int64
from torch import Tensor

BLOCK = 4096
"""Number of logits that one program holds at a time; larger blocks took 1.5 times as long on an H200."""
WARPS = 4


def row_scores(
    logits_CV: Float[Tensor, "C V"],
    bias_V: Float32[Tensor, "V"] | None,
    targets_C: Int64[Tensor, "C"],
    temperature_C: Float32[Tensor, "C"] | None,
    *,
    entropies: bool,
    squares: bool,
) -> tuple[Float32[Tensor, "C"], Float32[Tensor, "C"], Float32[Tensor, "C"], Float32[Tensor, "C"]]:
    """Return log-probability, entropy, Σ p² and log Σ e^z of each row of logits, in one pass.

    z are the row's logits plus bias, divided by the temperature; p is their softmax.

    Args:
        logits_CV: float16, bfloat16 or float32 [C, V], rows contiguous.
        bias_V: float32 [V] or None.
        targets_C: int64 [C], the token id whose log-probability is returned.
        temperature_C: float32 [C]; None means 1.
        entropies: whether to compute entropies; else 0 is returned for them.
        squares: whether to compute Σ p²; else 0 is returned for it.

    Returns:
        float32 [C] each: the targets' log-probabilities, entropies, Σ p², and log Σ e^z.
    """
    rows, vocabulary = logits_CV.shape
    log_probs_C, entropies_C, squares_C, lse_C = torch.zeros(
        4, rows, dtype=torch.float32, device=logits_CV.device
    ).unbind()
    if rows:
        _row_scores[(rows,)](
            logits_CV, bias_V, targets_C, temperature_C, log_probs_C, entropies_C, squares_C, lse_C,
            vocabulary, logits_CV.stride(0),
            HAS_BIAS=bias_V is not None, HAS_TEMPERATURE=temperature_C is not None,
            ENTROPIES=entropies, SQUARES=squares, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return log_probs_C, entropies_C, squares_C, lse_C


def into_gradient(
    logits_CV: Float[Tensor, "C V"],
    bias_V: Float32[Tensor, "V"] | None,
    targets_C: Int64[Tensor, "C"],
    temperature_C: Float32[Tensor, "C"] | None,
    lse_C: Float32[Tensor, "C"],
    grad_log_probs_C: Float32[Tensor, "C"],
    entropies_C: Float32[Tensor, "C"],
    grad_entropies_C: Float32[Tensor, "C"] | None,
) -> None:
    """Replace logits, in place, by the gradient of the loss with respect to them.

    The gradient of a row is (g (1_y − p) − h p (log p + H)) / temperature. Here p is the softmax, 1_y is 1 at the target token and else 0,
    H is the entropy, g is the loss's gradient with respect to the target's log-probability, and h that with respect to the entropy.

    Args:
        logits_CV: as for `row_scores`; [C, V], overwritten with the gradient in the same dtype.
        bias_V: as for `row_scores`.
        targets_C: as for `row_scores`.
        temperature_C: as for `row_scores`.
        lse_C: float32 [C], log Σ e^z as `row_scores` returns it.
        grad_log_probs_C: float32 [C], g.
        entropies_C: float32 [C], H; read only with `grad_entropies_C`.
        grad_entropies_C: float32 [C], h; None means 0.
    """
    rows, vocabulary = logits_CV.shape
    if rows:
        _into_gradient[(rows, triton.cdiv(vocabulary, BLOCK))](
            logits_CV, bias_V, targets_C, temperature_C,
            lse_C, grad_log_probs_C, entropies_C, grad_entropies_C,
            vocabulary, logits_CV.stride(0),
            HAS_BIAS=bias_V is not None, HAS_TEMPERATURE=temperature_C is not None,
            ENTROPIES=grad_entropies_C is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def _row_scores(  # noqa: C901 - every branch is settled when it is compiled
    logits, bias, targets, temperature, log_probs, entropies, squares, lse, vocabulary, stride,
    HAS_BIAS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    ENTROPIES: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # int64, since a chunk may have more than 2³¹ logits.
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    scale = 1.0
    if HAS_TEMPERATURE:
        scale = 1.0 / tl.load(temperature + row)
    lane = tl.arange(0, BLOCK)
    largest = float("-inf")
    # Each lane keeps its own sums until the end; only the maximum is reduced over the lanes in every iteration.
    sum_lane = tl.zeros([BLOCK], dtype=tl.float32)
    moment_lane = tl.zeros([BLOCK], dtype=tl.float32)
    square_lane = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, vocabulary, BLOCK):
        inside = first + lane < vocabulary
        z = tl.load(start + first + lane, mask=inside, other=float("-inf")).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(bias + first + lane, mask=inside, other=0.0)
        if HAS_TEMPERATURE:
            z *= scale
        higher = tl.maximum(largest, tl.max(z, axis=0))
        shrink = tl.exp(largest - higher)
        if ENTROPIES:
            # Before the first sum, −∞ · 0 must be 0.
            fallen = tl.where(sum_lane > 0, (largest - higher) * sum_lane, 0.0)
            moment_lane = (moment_lane + fallen) * shrink
        away = z - higher
        weight = tl.exp(away)
        sum_lane = sum_lane * shrink + weight
        if ENTROPIES:
            # Past the vocabulary, and at logits of −∞, `away * weight` is −∞ · 0, which is NaN.
            moment_lane += tl.where(weight > 0, away * weight, 0.0)
        if SQUARES:
            square_lane = square_lane * shrink * shrink + weight * weight
        largest = higher
    total = tl.sum(sum_lane, axis=0)
    log_total = tl.log(total)
    target = tl.load(targets + row)
    at_target = tl.load(start + target).to(tl.float32)
    if HAS_BIAS:
        at_target += tl.load(bias + target)
    if HAS_TEMPERATURE:
        at_target *= scale
    tl.store(lse + row, largest + log_total)
    tl.store(log_probs + row, at_target - largest - log_total)
    if ENTROPIES:
        tl.store(entropies + row, log_total - tl.sum(moment_lane, axis=0) / total)
    if SQUARES:
        tl.store(squares + row, tl.sum(square_lane, axis=0) / (total * total))


@triton.jit
def _into_gradient(
    logits, bias, targets, temperature, lse, grad_log_probs, entropies, grad_entropies,
    vocabulary, stride,
    HAS_BIAS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    ENTROPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    place = logits + row * stride + column
    # Writing in place is safe: only the program that overwrites a logit reads it.
    z = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + column, mask=inside, other=0.0)
    scale = 1.0
    if HAS_TEMPERATURE:
        scale = 1.0 / tl.load(temperature + row)
        z *= scale
    log_p = z - tl.load(lse + row)
    p = tl.exp(log_p)
    given = tl.load(grad_log_probs + row)
    grad = -given * p
    if ENTROPIES:
        # A logit of −∞ has p = 0 and log p = −∞, whose product is NaN.
        away = tl.where(p > 0, log_p + tl.load(entropies + row), 0.0)
        grad -= tl.load(grad_entropies + row) * p * away
    grad += tl.where(column == tl.load(targets + row), given, 0.0)
    if HAS_TEMPERATURE:
        grad *= scale
    tl.store(place, grad.to(logits.dtype.element_ty), mask=inside)
