"""Log-probabilities and entropies from hidden states, without holding all logits in float32.

Logits are computed one chunk of rows at a time. The backward pass recomputes the logits, unless all of them together are small.
With z = logits / temperature and p = softmax(z), for the token y:

    log p_y                      d log p_y / dz = 1_y − p
    H = −Σ p log p               dH / dz        = −p (log p + H)

Legend: R scored tokens, H hidden size, V vocabulary, C rows of a chunk, K token ids for each row, J = 1 + K.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor

from dovetail_torch_engines import fused_scores, fuses

CHUNK_ELEMENTS = {"cpu": 2**19}
"""The number of logits in one chunk on a CPU, chosen to fit its cache."""
CHUNK_ELEMENTS_ELSEWHERE = 2**28
"""The number of logits in one chunk on an accelerator, 1 GiB of float32. Large, since every chunk adds to the whole weight gradient
once."""
CHUNK_ROWS_AT_LEAST = 64
KEPT_ELEMENTS = 2**24
"""The number of logits, 64 MiB, up to which a micro-batch's logits are always kept for the backward pass."""


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
    ids_RK: Int64[Tensor, "R K"] | None = None,
    top_k: int = 0,
) -> dict[str, Shaped[Tensor, "R ..."]]:
    """Compute log-probabilities and other scores of tokens from hidden states and an output layer.

    Args:
        hidden_RH: float [R, H], the hidden state that predicts each token.
        weight_VH: float [V, H], the output layer.
        bias_V: float [V] or None.
        targets_R: int64 [R], the scored token ids.
        temperature_R: float32 [R]; None means 1.
        outputs: any of `log_probs`, `log_probs_at` and `entropies` (differentiable), `sum_pi_squared`, `top_ids` and `top_log_probs`.
        dtype: the dtype in which the output layer multiplies; softmax is float32.
        room: bytes of logits that may be kept for the backward pass, on accelerators.
        ids_RK: int64 [R, K], the token ids of `log_probs_at`.
        top_k: the number of tokens in `top_ids` and `top_log_probs`.

    Returns:
        The outputs by name: float32 [R], or [R, K] for K token ids, in nats; int32 [R, K] for `top_ids`.
    """
    if fuses(hidden_RH):
        return fused_scores(
            hidden_RH, weight_VH, bias_V, targets_R, temperature_R,
            outputs=outputs, dtype=dtype, room=room, ids_RK=ids_RK, top_k=top_k,
        )  # fmt: skip
    if torch.is_grad_enabled() and (hidden_RH.requires_grad or weight_VH.requires_grad):
        targets_RJ = targets_R[:, None]
        if ids_RK is not None:
            targets_RJ = torch.cat([targets_RJ, ids_RK], dim=1)
        log_probs_RJ, entropies_R, squares_R, top_ids_RK, top_log_probs_RK = _Scores.apply(  # type: ignore[no-untyped-call]
            hidden_RH, weight_VH, bias_V, targets_RJ, temperature_R, dtype,
            "entropies" in outputs, "sum_pi_squared" in outputs, top_k,
        )  # fmt: skip
        scores = {
            "log_probs": log_probs_RJ[:, 0],
            "log_probs_at": log_probs_RJ[:, 1:],
            "entropies": entropies_R,
            "sum_pi_squared": squares_R,
            "top_ids": top_ids_RK,
            "top_log_probs": top_log_probs_RK,
        }
        return {name: scores[name] for name in outputs}
    layer = _Layer(hidden_RH, weight_VH, bias_V, temperature_R, dtype)
    parts = [
        scores_of_logits(
            layer.logits(rows),
            targets_R[rows],
            outputs,
            ids_CK=None if ids_RK is None else ids_RK[rows],
            top_k=top_k,
        )
        for rows in layer.chunks() or [slice(0, 0)]
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in outputs}


def scores_of_logits(
    logits_CV: Float[Tensor, "C V"],
    targets_C: Int64[Tensor, "C"],
    outputs: frozenset[str],
    *,
    ids_CK: Int64[Tensor, "C K"] | None = None,
    top_k: int = 0,
) -> dict[str, Shaped[Tensor, "C ..."]]:
    """Compute scores of tokens from logits already divided by the temperature; differentiable.

    Args:
        logits_CV: float [C, V].
        targets_C: int64 [C], the scored token ids.
        outputs: as in `score_tokens`.
        ids_CK: int64 [C, K], the token ids of `log_probs_at`.
        top_k: the number of tokens in `top_ids` and `top_log_probs`.
    """
    log_pi_CV = logits_CV.log_softmax(-1, dtype=torch.float32)
    scores: dict[str, Tensor] = {}
    if "log_probs" in outputs:
        scores["log_probs"] = log_pi_CV.gather(-1, targets_C[:, None])[:, 0]
    if ids_CK is not None:
        scores["log_probs_at"] = log_pi_CV.gather(-1, ids_CK)
    if top_k:
        top_log_probs_CK, top_ids_CK = log_pi_CV.detach().topk(top_k, dim=-1)
        top = {"top_ids": top_ids_CK.int(), "top_log_probs": top_log_probs_CK}
        scores |= {name: values_CK for name, values_CK in top.items() if name in outputs}
    if outputs & {"entropies", "sum_pi_squared"}:
        pi_CV = log_pi_CV.exp()
        if "entropies" in outputs:
            scores["entropies"] = -torch.linalg.vecdot(pi_CV, log_pi_CV)
        if "sum_pi_squared" in outputs:
            scores["sum_pi_squared"] = torch.linalg.vecdot(pi_CV, pi_CV)
    return scores


class _Layer:
    """The output layer over some rows, which computes logits chunk by chunk."""

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
        """Return the rows of every chunk."""
        return [slice(i, i + self.step) for i in range(0, len(self.hidden_RH), self.step)]

    def logits(self, rows: slice) -> Tensor:
        """Return a chunk's logits / temperature [C, V], in float32 if there is a bias or a temperature."""
        # Autocast would choose another dtype.
        with torch.autocast(self.hidden_RH.device.type, enabled=False):
            logits_CV = self.hidden_RH[rows] @ self.weight_VH.t()
        if self.bias_V is not None:
            logits_CV = logits_CV.float().add_(self.bias_V)
        if self.temperature_R is not None:
            logits_CV = logits_CV.float().div_(self.temperature_R[rows, None])
        return logits_CV


class _Scores(torch.autograd.Function):
    """Autograd function of the log-probabilities of each row's target and K given token ids [R, J], entropies and Σ p² [R], and the K
    most likely token ids with their log-probabilities [R, K]. Σ p² and the most likely ids have no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_RJ: Tensor,
        temperature_R: Tensor | None,
        dtype: torch.dtype,
        with_entropies: bool,
        with_squares: bool,
        top_k: int,
    ) -> tuple[Tensor, ...]:
        layer = _Layer(hidden_RH, weight_VH, bias_V, temperature_R, dtype)
        keep = hidden_RH.shape[0] * weight_VH.shape[0] <= KEPT_ELEMENTS
        log_probs_RJ = hidden_RH.new_empty(targets_RJ.shape, dtype=torch.float32)
        entropies_R, squares_R = log_probs_RJ.new_zeros(2, len(targets_RJ))
        top_ids_RK = targets_RJ.new_empty(len(targets_RJ), top_k, dtype=torch.int32)
        top_log_probs_RK = log_probs_RJ.new_empty(top_ids_RK.shape)
        kept: list[Tensor] = []
        for rows in layer.chunks():
            log_pi_CV = layer.logits(rows).log_softmax(-1, dtype=torch.float32)
            log_probs_RJ[rows] = log_pi_CV.gather(-1, targets_RJ[rows])
            if top_k:
                top_log_probs_RK[rows], top_ids_RK[rows] = log_pi_CV.topk(top_k, dim=-1)
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
        ctx.save_for_backward(targets_RJ, entropies_R)
        ctx.mark_non_differentiable(squares_R, top_ids_RK, top_log_probs_RK)
        ctx.set_materialize_grads(False)
        return log_probs_RJ, entropies_R, squares_R, top_ids_RK, top_log_probs_RK

    @staticmethod
    def backward(
        ctx: Any,
        grad_log_probs_RJ: Tensor | None,
        grad_entropies_R: Tensor | None,
        *_: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        targets_RJ, entropies_R = ctx.saved_tensors
        layer, kept = ctx.layer, ctx.kept
        ctx.kept = []  # overwritten below: a second backward pass recomputes the logits
        dtype = layer.weight_VH.dtype
        grad_hidden_RH = torch.empty_like(layer.hidden_RH)
        # A frozen output layer, as with adapters, needs no weight gradient.
        grad_weight_VH = (
            torch.zeros_like(layer.weight_VH, dtype=torch.float32)
            if ctx.needs_input_grad[1]
            else None
        )
        grad_bias_V = torch.zeros_like(layer.bias_V) if ctx.needs_input_grad[2] else None
        if grad_log_probs_RJ is None:
            grad_log_probs_RJ = entropies_R.new_zeros(targets_RJ.shape)
        # The gradient of each word's log-probability contains the same −p, so that the words' factors are added up.
        given_R = grad_log_probs_RJ.sum(-1)
        for number, rows in enumerate(layer.chunks()):
            given_C = given_R[rows]
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
            _add_at(grad_CV, targets_RJ[rows], grad_log_probs_RJ[rows])
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
        return grad_hidden_RH, grad_weight_VH, grad_bias_V, *[None] * 6


def _add_at(grad_CV: Tensor, targets_CJ: Tensor, given_CJ: Tensor) -> None:
    """Add `given_CJ` to the gradient of logits, in place, at the columns `targets_CJ` of each row: its target and K token ids."""
    start_C = torch.arange(len(targets_CJ), device=targets_CJ.device) * grad_CV.shape[1]
    grad_CV.view(-1).index_add_(0, (start_C[:, None] + targets_CJ).flatten(), given_CJ.flatten())
