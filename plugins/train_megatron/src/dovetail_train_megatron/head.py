"""Log-probabilities and entropies from hidden states, over an output layer whose vocabulary is divided among ranks.

Each rank computes logits of its vocabulary shard, one chunk of rows at a time. Logits are not gathered: ranks exchange a maximum and a few
sums for every token. The backward pass recomputes the logits. With z = logits / temperature and p = softmax(z), for the token y:

    log p_y                      d log p_y / dz = 1_y − p
    H = −Σ p log p               dH / dz        = −p (log p + H)

Legend: R scored tokens, H hidden size, V this rank's shard of the vocabulary, C rows of a chunk, K further token ids
for each scored token, J = 1 + K.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor

from dovetail_torch_engines import Vocabulary, fused_scores, fuses

CHUNK_ELEMENTS = 2**28
"""The number of logits in one chunk on one rank: 1 GiB of float32."""
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
    ids_RK: Int64[Tensor, "R K"] | None = None,
    top_k: int = 0,
) -> dict[str, Shaped[Tensor, "R ..."]]:
    """Compute log-probabilities and other scores of tokens. Collective over the ranks that divide the vocabulary.

    Args:
        hidden_RH: float [R, H], the hidden state that predicts each token, the same on all of these ranks. The gradients that the
            ranks compute for it must be summed over the ranks.
        weight: float [≥ V, H], this rank's rows of the output layer.
        targets_R: int64 [R], token ids in the whole vocabulary.
        temperature_R: float32 [R], the sampling temperatures.
        vocabulary: this rank's shard of the vocabulary.
        outputs: any of `log_probs`, `log_probs_at` and `entropies` (differentiable), `sum_pi_squared`, `top_ids` and `top_log_probs`.
        chunk: the number of tokens whose logits are computed at once; None for as many as fill 1 GiB.
        ids_RK: int64 [R, K], the token ids of `log_probs_at`, in the whole vocabulary.
        top_k: the number of tokens in `top_ids` and `top_log_probs`.

    Returns:
        The outputs by name, the same on every rank, log-probabilities and entropies in nats: float32 [R]; [R, K] for
        `log_probs_at`; [R, top_k] for `top_ids` (int32) and `top_log_probs`.
    """
    if fuses(hidden_RH) and vocabulary.size:
        return fused_scores(
            hidden_RH, weight, None, targets_R, temperature_R,
            outputs=outputs, dtype=weight.dtype, vocabulary=vocabulary, chunk=chunk, ids_RK=ids_RK, top_k=top_k,
        )  # fmt: skip
    targets_RJ = targets_R[:, None]
    if ids_RK is not None:
        targets_RJ = torch.cat([targets_RJ, ids_RK], dim=1)
    log_probs_RJ, entropies_R, squares_R, top_ids_RK, top_log_probs_RK = _Scores.apply(  # type: ignore[no-untyped-call]
        hidden_RH, weight, targets_RJ, temperature_R, vocabulary, frozenset(outputs), chunk, top_k
    )
    scores = {
        "log_probs": log_probs_RJ[:, 0],
        "log_probs_at": log_probs_RJ[:, 1:],
        "entropies": entropies_R,
        "sum_pi_squared": squares_R,
        "top_ids": top_ids_RK,
        "top_log_probs": top_log_probs_RK,
    }
    return {name: scores[name] for name in outputs}


class _Scores(torch.autograd.Function):
    """Autograd function that returns log-probabilities [R, J], entropies [R], Σ p² [R], and the `top_k` most likely token ids with
    their log-probabilities, [R, top_k] each. Only the first two have gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight: Tensor,
        targets_RJ: Tensor,
        temperature_R: Tensor,
        vocabulary: Vocabulary,
        outputs: frozenset[str],
        chunk: int | None,
        top_k: int,
    ) -> tuple[Tensor, ...]:
        layer = _Layer(hidden_RH, weight, targets_RJ, temperature_R, vocabulary, chunk)
        device = hidden_RH.device
        scores_3R = torch.zeros(3, len(targets_RJ), dtype=torch.float32, device=device)
        log_probs_RJ = torch.empty(targets_RJ.shape, dtype=torch.float32, device=device)
        top_ids_RK = torch.empty(len(targets_RJ), top_k, dtype=torch.int32, device=device)
        top_log_probs_RK = torch.empty(top_ids_RK.shape, dtype=torch.float32, device=device)
        for rows in layer.chunks():
            shifted_CV, largest_C = layer.shifted(rows)
            if top_k:
                own = vocabulary.top_of_part(shifted_CV, top_k)
                top_ids_RK[rows], top_log_probs_RK[rows] = vocabulary.merged_top(*own)
            log_probs_RJ[rows], log_C = layer.score(rows, outputs, shifted_CV, scores_3R)
            top_log_probs_RK[rows] -= log_C[:, None]
            scores_3R[2, rows] = largest_C + log_C
        entropies_R, squares_R, lse_R = (scores_R.clone() for scores_R in scores_3R)
        ctx.layer = layer
        ctx.save_for_backward(entropies_R, lse_R)
        ctx.mark_non_differentiable(squares_R, top_ids_RK, top_log_probs_RK)
        ctx.set_materialize_grads(False)
        return log_probs_RJ, entropies_R.clone(), squares_R, top_ids_RK, top_log_probs_RK

    @staticmethod
    def backward(
        ctx: Any,
        grad_log_probs_RJ: Tensor | None,
        grad_entropies_R: Tensor | None,
        *_: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        layer: _Layer = ctx.layer
        entropies_R, lse_R = ctx.saved_tensors
        given_RJ = grad_log_probs_RJ
        if given_RJ is None:
            given_RJ = torch.zeros(layer.targets_RJ.shape, dtype=torch.float32, device=lse_R.device)
        # The gradient of each word's log-probability contains the same −p, so that the words' factors are added up.
        given_R = given_RJ.sum(-1)
        grad_hidden_RH = torch.empty_like(layer.hidden_RH)
        # A frozen output layer, as with adapters, needs no weight gradient.
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
            place_CJ, mine_CJ = layer.vocabulary.places(layer.targets_RJ[rows])
            grad_CV.scatter_add_(1, place_CJ, given_RJ[rows] * mine_CJ)
            grad_CV.div_(layer.temperature_R[rows, None])
            narrow_CV = grad_CV.to(layer.weight.dtype)
            grad_hidden_RH[rows] = narrow_CV @ layer.weight_VH
            if grad_weight is not None:
                grad_weight[: layer.vocabulary.size] += narrow_CV.t() @ layer.hidden_RH[rows]
        narrow = None if grad_weight is None else grad_weight.to(layer.weight.dtype)
        return grad_hidden_RH, narrow, *[None] * 6


class _Layer:
    """This rank's shard of the output layer with the R hidden states to score; computes logits chunk by chunk."""

    def __init__(
        self,
        hidden_RH: Tensor,
        weight: Tensor,
        targets_RJ: Tensor,
        temperature_R: Tensor,
        vocabulary: Vocabulary,
        chunk: int | None,
    ) -> None:
        self.hidden_RH = hidden_RH.detach()
        self.weight = weight.detach()
        self.weight_VH = self.weight[: vocabulary.size]
        self.targets_RJ, self.temperature_R = targets_RJ, temperature_R
        self.vocabulary = vocabulary
        self._step = chunk or max(CHUNK_ROWS_AT_LEAST, CHUNK_ELEMENTS // max(1, vocabulary.size))

    def chunks(self) -> list[slice]:
        """Return the ranges of hidden states that form the chunks, as slices of the R rows."""
        return [slice(i, i + self._step) for i in range(0, len(self.hidden_RH), self._step)]

    def logits(self, rows: slice) -> Tensor:
        """Return logits / temperature of a chunk, float32 [C, V]."""
        logits_CV = (self.hidden_RH[rows] @ self.weight_VH.t()).float()
        return logits_CV.div_(self.temperature_R[rows, None])

    def shifted(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return z minus its maximum over all ranks, float32 [C, V], and this maximum, [C]. Collective."""
        z_CV = self.logits(rows)
        largest_C = self.vocabulary.maximum(z_CV.amax(-1))
        return z_CV.sub_(largest_C[:, None]), largest_C

    def score(
        self, rows: slice, outputs: frozenset[str], shifted_CV: Tensor, scores_3R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log p [C, J] of a chunk, and log Σ exp of its shifted z, [C]. Collective.

        The chunk's entropies H are written to `scores_3R[0, rows]`, and its Σ p² to `scores_3R[1, rows]`. Each is valid only if `outputs`
        names it.
        """
        place_CJ, mine_CJ = self.vocabulary.places(self.targets_RJ[rows])
        chosen_CJ = shifted_CV.gather(-1, place_CJ) * mine_CJ
        exp_CV = shifted_CV.exp()
        sum_C = exp_CV.sum(-1)
        sums = [sum_C]
        sums.append(
            torch.linalg.vecdot(exp_CV, shifted_CV) if "entropies" in outputs else sum_C * 0
        )
        sums.append(
            torch.linalg.vecdot(exp_CV, exp_CV) if "sum_pi_squared" in outputs else sum_C * 0
        )
        total = self.vocabulary.total(torch.cat([torch.stack(sums), chosen_CJ.t()]))
        sum_C, weighted_C, squares_C = total[:3]
        log_C = sum_C.log()
        scores_3R[0, rows] = log_C - weighted_C / sum_C
        scores_3R[1, rows] = squares_C / sum_C.square()
        return total[3:].t() - log_C[:, None], log_C
