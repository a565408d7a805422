"""From hidden states to log-probabilities and entropies, over an output layer whose vocabulary is divided among ranks.

Logits are made a chunk of rows at a time, each rank's own part of the vocabulary, and never gathered: ranks exchange a
maximum and a few sums for every token. The backward pass makes the logits again. With z = logits / temperature and
p = softmax(z), for the token y:

    log p_y                      d log p_y / dz = 1_y − p
    H = −Σ p log p               dH / dz        = −p (log p + H)

Legend: R scored tokens, H hidden size, V this rank's part of the vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from dovetail.training import Vocabulary, fused_scores, fuses

CHUNK_ELEMENTS = 2**28
"""Logits of one chunk on one rank: 1 GiB of float32."""
CHUNK_ROWS_AT_LEAST = 64


def score_tokens(
    hidden_RH: Float[Tensor, "R H"],
    weight: Float[Tensor, "padded H"],
    targets_R: Int64[Tensor, "R"],
    temperature_R: Float32[Tensor, "R"],
    vocabulary: Vocabulary,
    *,
    outputs: frozenset[str],
    chunk: int | None = None,
) -> dict[str, Float32[Tensor, "R"]]:
    """Score tokens under an output layer. Collective over the vocabulary's ranks, which hold the same hidden states.

    Args:
        hidden_RH: float [R, H], the hidden state that predicts each token. Its gradient is this rank's part of a sum over
            the ranks.
        weight: float [≥ V, H], this rank's rows of the output layer.
        targets_R: int64 [R], of the whole vocabulary.
        temperature_R: float32 [R].
        vocabulary: which part is this rank's.
        outputs: of `log_probs`, `entropies`, `sum_pi_squared`; the last has no gradient.
        chunk: rows of a chunk; None: as many as make 1 GiB.

    Returns:
        float32 [R] each, in nats; the same on every rank.
    """
    if fuses(hidden_RH) and vocabulary.size:
        return fused_scores(
            hidden_RH, weight, None, targets_R, temperature_R,
            outputs=outputs, dtype=weight.dtype, vocabulary=vocabulary, chunk=chunk,
        )  # fmt: skip
    log_probs_R, entropies_R, squares_R = _Scores.apply(  # type: ignore[no-untyped-call]
        hidden_RH, weight, targets_R, temperature_R, vocabulary, frozenset(outputs), chunk
    )
    scores = {"log_probs": log_probs_R, "entropies": entropies_R, "sum_pi_squared": squares_R}
    return {name: scores[name] for name in outputs}


class _Scores(torch.autograd.Function):
    """Log-probabilities, entropies and Σ p², float32 [R] each; the last without a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight: Tensor,
        targets_R: Tensor,
        temperature_R: Tensor,
        vocabulary: Vocabulary,
        outputs: frozenset[str],
        chunk: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        layer = _Layer(hidden_RH, weight, targets_R, temperature_R, vocabulary, chunk)
        scores_4R = torch.zeros(4, len(targets_R), dtype=torch.float32, device=hidden_RH.device)
        for rows in layer.chunks():
            layer.score(rows, outputs, scores_4R)
        log_probs_R, entropies_R, squares_R, lse_R = scores_4R.unbind()
        ctx.layer = layer
        ctx.save_for_backward(entropies_R, lse_R)
        ctx.mark_non_differentiable(squares_R)
        ctx.set_materialize_grads(False)
        return log_probs_R.clone(), entropies_R.clone(), squares_R.clone()

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs_R: Tensor | None, grad_entropies_R: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        layer: _Layer = ctx.layer
        entropies_R, lse_R = ctx.saved_tensors
        given_R = torch.zeros_like(lse_R) if grad_log_probs_R is None else grad_log_probs_R
        grad_hidden_RH = torch.empty_like(layer.hidden_RH)
        # A frozen output layer, as under adapters, is spared its share of the work.
        grad_weight = (
            torch.zeros_like(layer.weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        for rows in layer.chunks():
            grad_CV = layer.logits(rows).sub_(lse_R[rows, None])  # log p
            pi_CV = grad_CV.exp()
            if grad_entropies_R is None:
                grad_CV = pi_CV.mul_(-given_R[rows, None])
            else:
                # p (−g − h (log p + H)): both outputs' gradients share the factor p.
                grad_CV.add_(entropies_R[rows, None]).mul_(-grad_entropies_R[rows, None])
                grad_CV.sub_(given_R[rows, None]).mul_(pi_CV)
            place_C, mine_C = layer.vocabulary.places(layer.targets_R[rows])
            added_C = (given_R[rows] * mine_C)[:, None]
            grad_CV.scatter_add_(1, place_C[:, None], added_C)
            grad_CV.div_(layer.temperature_R[rows, None])
            narrow_CV = grad_CV.to(layer.weight.dtype)
            grad_hidden_RH[rows] = narrow_CV @ layer.weight_VH
            if grad_weight is not None:
                grad_weight[: layer.vocabulary.size] += narrow_CV.t() @ layer.hidden_RH[rows]
        narrow = None if grad_weight is None else grad_weight.to(layer.weight.dtype)
        return grad_hidden_RH, narrow, None, None, None, None, None


class _Layer:
    """This rank's part of the output layer over some rows, whose logits are made chunk by chunk."""

    def __init__(
        self,
        hidden_RH: Tensor,
        weight: Tensor,
        targets_R: Tensor,
        temperature_R: Tensor,
        vocabulary: Vocabulary,
        chunk: int | None,
    ) -> None:
        self.hidden_RH = hidden_RH.detach()
        self.weight = weight.detach()
        self.weight_VH = self.weight[: vocabulary.size]
        self.targets_R, self.temperature_R = targets_R, temperature_R
        self.vocabulary = vocabulary
        self._step = chunk or max(CHUNK_ROWS_AT_LEAST, CHUNK_ELEMENTS // max(1, vocabulary.size))

    def chunks(self) -> list[slice]:
        """The rows of every chunk."""
        return [slice(i, i + self._step) for i in range(0, len(self.hidden_RH), self._step)]

    def logits(self, rows: slice) -> Tensor:
        """float32 [C, V]: logits / temperature."""
        logits_CV = (self.hidden_RH[rows] @ self.weight_VH.t()).float()
        return logits_CV.div_(self.temperature_R[rows, None])

    def score(self, rows: slice, outputs: frozenset[str], scores_4R: Tensor) -> None:
        """Fill in log p, H, Σ p² and log Σ exp z of some rows. Collective."""
        shifted_CV = self.logits(rows)
        largest_C = self.vocabulary.maximum(shifted_CV.amax(-1))
        shifted_CV.sub_(largest_C[:, None])
        place_C, mine_C = self.vocabulary.places(self.targets_R[rows])
        chosen_C = shifted_CV.gather(-1, place_C[:, None])[:, 0] * mine_C
        exp_CV = shifted_CV.exp()
        sums = [exp_CV.sum(-1), chosen_C]
        sums.append(
            torch.linalg.vecdot(exp_CV, shifted_CV) if "entropies" in outputs else chosen_C * 0
        )
        sums.append(
            torch.linalg.vecdot(exp_CV, exp_CV) if "sum_pi_squared" in outputs else chosen_C * 0
        )
        sum_C, chosen_C, weighted_C, squares_C = self.vocabulary.total(torch.stack(sums)).unbind()
        log_C = sum_C.log()
        scores_4R[0, rows] = chosen_C - log_C
        scores_4R[1, rows] = log_C - weighted_C / sum_C
        scores_4R[2, rows] = squares_C / sum_C.square()
        scores_4R[3, rows] = largest_C + log_C
