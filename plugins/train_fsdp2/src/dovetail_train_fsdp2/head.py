"""From hidden states to log-probabilities and entropies, without ever holding all logits in float32.

Logits are made a chunk of rows at a time. The backward pass makes them again, unless all of them together are small.
With z = logits / temperature and p = softmax(z), for the token y:

    log p_y                      d log p_y / dz = 1_y − p
    H = −Σ p log p               dH / dz        = −p (log p + H)

Legend: R scored tokens, H hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from dovetail.training import fused_scores, fuses

CHUNK_ELEMENTS = {"cpu": 2**19}
"""Logits of one chunk: on a CPU as many as its cache likes."""
CHUNK_ELEMENTS_ELSEWHERE = 2**28
"""On accelerators few chunks (1 GiB of float32 each): every chunk adds to the whole weight gradient once."""
CHUNK_ROWS_AT_LEAST = 64
KEPT_ELEMENTS = 2**24
"""Up to so many logits of a micro-batch (64 MiB) are kept for the backward pass."""


def score_tokens(
    hidden_RH: Float[Tensor, "R H"],
    weight_VH: Float[Tensor, "V H"],
    bias_V: Float[Tensor, "V"] | None,
    targets_R: Int64[Tensor, "R"],
    temperature_R: Float32[Tensor, "R"] | None,
    *,
    outputs: frozenset[str],
    dtype: torch.dtype,
    room: int = 0,
) -> dict[str, Float32[Tensor, "R"]]:
    """Score tokens under an output layer.

    Args:
        hidden_RH: float [R, H], the hidden state that predicts each token.
        weight_VH: float [V, H], the output layer.
        bias_V: float [V] or None.
        targets_R: int64 [R].
        temperature_R: float32 [R]; None means 1.
        outputs: of `log_probs`, `entropies`, `sum_pi_squared`; the last has no gradient.
        dtype: in which the output layer multiplies; softmax is float32.
        room: bytes of logits that may be kept for the backward pass, on accelerators.

    Returns:
        float32 [R] each, in nats.
    """
    if fuses(hidden_RH):
        return fused_scores(
            hidden_RH, weight_VH, bias_V, targets_R, temperature_R,
            outputs=outputs, dtype=dtype, room=room,
        )  # fmt: skip
    if torch.is_grad_enabled() and (hidden_RH.requires_grad or weight_VH.requires_grad):
        log_probs_R, entropies_R, squares_R = _Scores.apply(  # type: ignore[no-untyped-call]
            hidden_RH, weight_VH, bias_V, targets_R, temperature_R, dtype,
            "entropies" in outputs, "sum_pi_squared" in outputs,
        )  # fmt: skip
        scores = {"log_probs": log_probs_R, "entropies": entropies_R, "sum_pi_squared": squares_R}
        return {name: scores[name] for name in outputs}
    layer = _Layer(hidden_RH, weight_VH, bias_V, temperature_R, dtype)
    scores = {name: hidden_RH.new_empty(len(targets_R), dtype=torch.float32) for name in outputs}
    for rows in layer.chunks():
        chunk = scores_of_logits(layer.logits(rows), targets_R[rows], outputs)
        for name, values_C in chunk.items():
            scores[name][rows] = values_C
    return scores


def scores_of_logits(
    logits_CV: Float[Tensor, "C V"], targets_C: Int64[Tensor, "C"], outputs: frozenset[str]
) -> dict[str, Float32[Tensor, "C"]]:
    """Score tokens under logits that are divided by the temperature already; carries the gradient.

    Args:
        logits_CV: float [C, V].
        targets_C: int64 [C].
        outputs: as in `score_tokens`.
    """
    log_pi_CV = logits_CV.log_softmax(-1, dtype=torch.float32)
    scores: dict[str, Tensor] = {}
    if "log_probs" in outputs:
        scores["log_probs"] = log_pi_CV.gather(-1, targets_C[:, None])[:, 0]
    if outputs & {"entropies", "sum_pi_squared"}:
        pi_CV = log_pi_CV.exp()
        if "entropies" in outputs:
            scores["entropies"] = -torch.linalg.vecdot(pi_CV, log_pi_CV)
        if "sum_pi_squared" in outputs:
            scores["sum_pi_squared"] = torch.linalg.vecdot(pi_CV, pi_CV)
    return scores


class _Layer:
    """An output layer over some rows, which gives logits chunk by chunk."""

    def __init__(
        self,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        temperature_R: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.hidden_RH = hidden_RH.detach().to(dtype)
        self.weight_VH = weight_VH.detach().to(dtype)
        self.bias_V = None if bias_V is None else bias_V.detach().float()
        self.temperature_R = temperature_R
        elements = CHUNK_ELEMENTS.get(hidden_RH.device.type, CHUNK_ELEMENTS_ELSEWHERE)
        self.step = max(CHUNK_ROWS_AT_LEAST, elements // weight_VH.shape[0])

    def chunks(self) -> list[slice]:
        """The rows of every chunk."""
        return [slice(i, i + self.step) for i in range(0, len(self.hidden_RH), self.step)]

    def logits(self, rows: slice) -> Tensor:
        """[C, V]: logits / temperature, float32 where anything but the matrix product went into them."""
        # Autocast would choose a dtype of its own.
        with torch.autocast(self.hidden_RH.device.type, enabled=False):
            logits_CV = self.hidden_RH[rows] @ self.weight_VH.t()
        if self.bias_V is not None:
            logits_CV = logits_CV.float().add_(self.bias_V)
        if self.temperature_R is not None:
            logits_CV = logits_CV.float().div_(self.temperature_R[rows, None])
        return logits_CV


class _Scores(torch.autograd.Function):
    """Log-probabilities, entropies and Σ p², float32 [R] each; the last without a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_R: Tensor,
        temperature_R: Tensor | None,
        dtype: torch.dtype,
        with_entropies: bool,
        with_squares: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        layer = _Layer(hidden_RH, weight_VH, bias_V, temperature_R, dtype)
        keep = hidden_RH.shape[0] * weight_VH.shape[0] <= KEPT_ELEMENTS
        log_probs_R = hidden_RH.new_empty(len(targets_R), dtype=torch.float32)
        entropies_R, squares_R = torch.zeros_like(log_probs_R), torch.zeros_like(log_probs_R)
        kept: list[Tensor] = []
        for rows in layer.chunks():
            log_pi_CV = layer.logits(rows).log_softmax(-1, dtype=torch.float32)
            log_probs_R[rows] = log_pi_CV.gather(-1, targets_R[rows, None])[:, 0]
            if not (with_entropies or with_squares or keep):
                continue
            pi_CV = log_pi_CV.exp() if with_entropies else log_pi_CV.exp_()
            if with_entropies:
                entropies_R[rows] = -torch.linalg.vecdot(pi_CV, log_pi_CV)
            if with_squares:
                squares_R[rows] = torch.linalg.vecdot(pi_CV, pi_CV)
            if keep:
                kept.append(pi_CV)
        ctx.layer, ctx.kept = layer, kept
        ctx.save_for_backward(targets_R, entropies_R)
        ctx.mark_non_differentiable(squares_R)
        ctx.set_materialize_grads(False)
        return log_probs_R, entropies_R, squares_R

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs_R: Tensor | None, grad_entropies_R: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        targets_R, entropies_R = ctx.saved_tensors
        layer, kept = ctx.layer, ctx.kept
        ctx.kept = []  # Overwritten below: a second backward pass makes the logits again.
        dtype = layer.weight_VH.dtype
        grad_hidden_RH = torch.empty_like(layer.hidden_RH)
        # A frozen output layer, as under adapters, is spared its share of the work.
        grad_weight_VH = (
            torch.zeros_like(layer.weight_VH, dtype=torch.float32)
            if ctx.needs_input_grad[1]
            else None
        )
        grad_bias_V = torch.zeros_like(layer.bias_V) if ctx.needs_input_grad[2] else None
        if grad_log_probs_R is None:
            grad_log_probs_R = torch.zeros_like(entropies_R)
        for number, rows in enumerate(layer.chunks()):
            given_C, targets_C = grad_log_probs_R[rows], targets_R[rows]
            if grad_entropies_R is not None:
                grad_CV = layer.logits(rows).log_softmax(-1, dtype=torch.float32)
                pi_CV = grad_CV.exp()
                # p (−g − h (log p + H)): both outputs' gradients share the factor p.
                grad_CV.add_(entropies_R[rows, None]).mul_(-grad_entropies_R[rows, None])
                grad_CV.sub_(given_C[:, None]).mul_(pi_CV)
            else:
                grad_CV = (
                    kept[number] if kept else layer.logits(rows).softmax(-1, dtype=torch.float32)
                )
                grad_CV.mul_(-given_C[:, None])
            _add_at(grad_CV, targets_C, given_C)
            if layer.temperature_R is not None:
                grad_CV /= layer.temperature_R[rows, None]
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            narrow_CV = grad_CV.to(dtype)
            grad_hidden_RH[rows] = narrow_CV @ layer.weight_VH
            if grad_weight_VH is None:
                continue
            if dtype == torch.float32:
                grad_weight_VH.addmm_(narrow_CV.t(), layer.hidden_RH[rows])
            else:
                grad_weight_VH += narrow_CV.t() @ layer.hidden_RH[rows]
        return grad_hidden_RH, grad_weight_VH, grad_bias_V, *[None] * 5


def _add_at(grad_CV: Tensor, targets_C: Tensor, given_C: Tensor) -> None:
    """Add each row's value at its target, in place."""
    start_C = torch.arange(len(targets_C), device=targets_C.device) * grad_CV.shape[1]
    grad_CV.view(-1).index_add_(0, start_C + targets_C, given_C)
