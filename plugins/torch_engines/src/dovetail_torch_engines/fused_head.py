"""The output layer in Triton kernels: scores of tokens from a single read of each chunk of logits.

One kernel reads a chunk's logits, which have the compute dtype, for all outputs. The backward pass recomputes the logits unless
there was memory to keep them, then overwrites the logits with their gradient. The weight gradient is accumulated in float32 within
the matrix product. If ranks divide the vocabulary, each rank processes its own shard; the ranks then exchange a maximum and a few
sums for every token.

Legend: R scored tokens, H hidden size, V vocabulary or this rank's part of it, P padding after it, C rows of a chunk, K words: token
ids for each row, besides its target, that are given or are the most likely.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dovetail_torch_engines.vocabulary import Vocabulary

CHUNK_BYTES = 2**30
"""Bytes of logits in one chunk, if there are enough rows: every chunk reads and writes the weight gradient once."""
CHUNK_ROWS_AT_LEAST = 1024
ROW_MULTIPLE = 128
"""Divisor of a chunk's number of rows: the tile of the matrix product."""

_logger = logging.getLogger(__name__)


def fuses(hidden_RH: Tensor) -> bool:
    """Return whether the fused kernels can run on the device of the hidden states."""
    return hidden_RH.device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    found = find_spec("triton") is not None
    if not found:
        _logger.warning(
            "the package triton is not installed: the output layer runs without Triton kernels, slower and with more memory"
        )
    return found


def fused_scores(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_R: Tensor,
    temperature_R: Tensor | None,
    *,
    outputs: frozenset[str],
    dtype: torch.dtype,
    room: int = 0,
    vocabulary: Vocabulary | None = None,
    chunk: int | None = None,
    ids_RK: Tensor | None = None,
    top_k: int = 0,
) -> dict[str, Tensor]:
    """Compute log-probabilities and other scores of tokens. Collective over the ranks that divide the vocabulary; they must hold
    the same hidden states.

    Args:
        hidden_RH: float [R, H], the hidden state that predicts each token. If the vocabulary is divided, the gradient is this
            rank's summand of a sum over the ranks.
        weight_VH: float [V, H], this rank's rows of the output layer; [V + P, H], with P rows of padding, if the vocabulary is
            divided.
        bias_V: float [V] or None; None if the vocabulary is divided.
        targets_R: int64 [R], token ids in the whole vocabulary.
        temperature_R: float32 [R]; None means 1.
        outputs: any of `log_probs`, `log_probs_at` and `entropies` (differentiable), `sum_pi_squared`, `top_ids` and `top_log_probs`.
        dtype: the dtype in which the output layer multiplies; softmax is float32.
        room: bytes of logits that may be kept for the backward pass.
        vocabulary: this rank's shard of the vocabulary, at least one token; None for the whole vocabulary.
        chunk: the number of rows of hidden states that are processed at once; None to use `chunk_rows`.
        ids_RK: int64 [R, K], the token ids of `log_probs_at`, in the whole vocabulary. If a row repeats an id, gradients are not
            deterministic.
        top_k: the number of tokens in `top_ids` and `top_log_probs`.

    Returns:
        The outputs by name, the same on every rank: float32 [R], or [R, K] for K token ids, in nats; int32 [R, K] for `top_ids`.
    """
    found = _FusedScores.apply(  # type: ignore[no-untyped-call]
        hidden_RH, weight_VH, bias_V, targets_R, temperature_R, dtype,
        "entropies" in outputs, "sum_pi_squared" in outputs, room if torch.is_grad_enabled() else 0,
        vocabulary, chunk, ids_RK, top_k,
    )  # fmt: skip
    names = ("log_probs", "entropies", "sum_pi_squared", "log_probs_at", "top_ids", "top_log_probs")
    return {name: scores for name, scores in zip(names, found, strict=True) if name in outputs}


def chunk_rows(rows: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Return the number of rows to process at once, so that chunks are about equal and as few as `CHUNK_BYTES` allows."""
    most = max(CHUNK_ROWS_AT_LEAST, CHUNK_BYTES // (vocabulary * dtype.itemsize))
    chunks = max(1, -(-rows // most))
    return -(-max(1, rows) // (chunks * ROW_MULTIPLE)) * ROW_MULTIPLE


class _FusedScores(torch.autograd.Function):
    """Autograd function of all scores: the targets' log-probabilities, entropies and Σ p², float32 [R] each; the log-probabilities of K
    given token ids, [R, K]; and the K most likely token ids with their log-probabilities. Σ p² and the most likely ids have no gradient.
    """

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
        room: int,
        vocabulary: Vocabulary | None,
        chunk: int | None,
        ids_RK: Tensor | None,
        top_k: int,
    ) -> tuple[Tensor, ...]:
        from dovetail_torch_engines.head_kernels import row_scores

        part = vocabulary or Vocabulary(first=0, size=len(weight_VH), group=None)
        own_VH, mine_R = weight_VH, None
        if vocabulary is not None:
            own_VH = weight_VH[: vocabulary.size]
            targets_R, mine_R = vocabulary.places(targets_R)
        given_RK = targets_R.new_empty(len(targets_R), 0) if ids_RK is None else ids_RK
        place_RK, mine_RK = part.places(given_RK)
        z_RK = torch.empty(place_RK.shape, dtype=torch.float32, device=hidden_RH.device)
        top_RK = torch.empty(len(targets_R), top_k, dtype=torch.int32, device=hidden_RH.device)
        top_z_RK = torch.empty(top_RK.shape, dtype=torch.float32, device=hidden_RH.device)
        chunks = _Chunks(hidden_RH, own_VH, bias_V, targets_R, temperature_R, dtype, chunk)
        chunks.keep(room)
        scores_4R = torch.empty(4, len(targets_R), dtype=torch.float32, device=hidden_RH.device)
        for rows in chunks.rows:
            logits_CV = chunks.logits(rows)
            found = row_scores(
                logits_CV, chunks.bias_V, targets_R[rows], chunks.temperature(rows),
                entropies=with_entropies, squares=with_squares,
            )  # fmt: skip
            torch.stack(found, out=scores_4R[:, rows])
            if ids_RK is not None:
                z_RK[rows] = chunks.scaled_at(rows, logits_CV, place_RK[rows])
            if top_k:
                top_RK[rows], z_CK = part.top_of_part(chunks.biased(logits_CV), top_k)
                top_z_RK[rows] = chunks.scaled(rows, z_CK)
        chunks.free()
        if vocabulary is not None and mine_R is not None:
            scores_4R = vocabulary.merged(scores_4R, mine_R)
            # −1 matches no column: if another rank has the target, this rank's gradient is only that of −log Σ e^z.
            chunks.targets_R = targets_R.masked_fill(~mine_R, -1)
            if ids_RK is not None:
                z_RK = vocabulary.total(z_RK.masked_fill_(~mine_RK, 0))
            if top_k:
                top_RK, top_z_RK = vocabulary.merged_top(top_RK, top_z_RK)
        log_probs_R, entropies_R, squares_R, lse_R = scores_4R.unbind()
        squares_R, top_log_probs_RK = squares_R.clone(), top_z_RK - lse_R[:, None]
        ctx.chunks, ctx.padding = chunks, len(weight_VH) - len(own_VH)
        ctx.save_for_backward(entropies_R, lse_R, place_RK, mine_RK)
        ctx.mark_non_differentiable(squares_R, top_RK, top_log_probs_RK)
        ctx.set_materialize_grads(False)
        log_probs_RK = z_RK - lse_R[:, None]
        return (
            log_probs_R.clone(), entropies_R.clone(), squares_R, log_probs_RK, top_RK, top_log_probs_RK,
        )  # fmt: skip

    @staticmethod
    def backward(
        ctx: Any,
        grad_log_probs_R: Tensor | None,
        grad_entropies_R: Tensor | None,
        _: Tensor | None,
        grad_log_probs_RK: Tensor | None,
        *__: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        from dovetail_torch_engines.head_kernels import into_gradient

        chunks: _Chunks = ctx.chunks
        entropies_R, lse_R, place_RK, mine_RK = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_RH, weight_VH = chunks.hidden_RH, chunks.weight_VH
        grad_hidden_RH = torch.empty_like(hidden_RH) if needs_hidden else None
        grad_weight_VH = None
        if needs_weight:
            grad_weight_VH = _WeightGradient(weight_VH, len(chunks.rows), ctx.padding)
        bias_V = chunks.bias_V if needs_bias else None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        given_R = torch.zeros_like(lse_R) if grad_log_probs_R is None else grad_log_probs_R
        given_R = given_R.contiguous()
        targets_R = chunks.targets_R
        if grad_log_probs_RK is not None:
            # The kernel subtracts the sum of the gradients times p, as for one word. Columns −1 make it add nothing: `_merged` does.
            given_RK = grad_log_probs_RK * mine_RK
            place_RX, added_RX = _merged(
                targets_R, given_R, place_RK.masked_fill(~mine_RK, -2), given_RK
            )
            given_R = given_R + grad_log_probs_RK.sum(-1)
            targets_R = torch.full_like(targets_R, -1)
        of_entropies_R = None if grad_entropies_R is None else grad_entropies_R.contiguous()
        for rows in chunks.rows:
            grad_CV = chunks.kept_logits(rows)
            into_gradient(
                grad_CV, chunks.bias_V, targets_R[rows], chunks.temperature(rows),
                lse_R[rows], given_R[rows], entropies_R[rows],
                None if of_entropies_R is None else of_entropies_R[rows],
            )  # fmt: skip
            if grad_log_probs_RK is not None:
                added_CX = chunks.scaled(rows, added_RX[rows])
                grad_CV.scatter_add_(1, place_RX[rows], added_CX.to(grad_CV.dtype))
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0, dtype=torch.float32)
            if grad_hidden_RH is not None:
                torch.mm(grad_CV, weight_VH, out=grad_hidden_RH[rows])
            if grad_weight_VH is not None:
                grad_weight_VH.add(grad_CV, hidden_RH[rows])
        chunks.free()
        whole = None if grad_weight_VH is None else grad_weight_VH.padded
        return grad_hidden_RH, whole, grad_bias_V, *[None] * 10


def _merged(
    targets_R: Tensor, given_R: Tensor, place_RK: Tensor, given_RK: Tensor
) -> tuple[Tensor, Tensor]:
    """Combine the gradients of each row's target and K words, so that one scatter can add them to the gradient of the logits.

    If a target is one of the words, its gradient is added to the word's: two additions to one column have no fixed order.

    Args:
        targets_R: int64 [R], column of the target; negative if another rank has it.
        given_R: float32 [R], gradients of the targets.
        place_RK: int64 [R, K], columns of the words; negative, but unequal to the target's, if another rank has the word.
        given_RK: float32 [R, K], gradients of the words; 0 where another rank has the word.

    Returns:
        The columns, int64 [R, 1 + K], and the gradients to add there, float32 [R, 1 + K]. Negative columns become 0, with gradient 0.
    """
    same_RK = place_RK == targets_R[:, None]
    alone_R = (targets_R >= 0) & ~same_RK.any(-1)
    first_RK = same_RK & (same_RK.cumsum(-1) == 1)
    given_RK = given_RK + first_RK * given_R[:, None]
    place_RX = torch.cat([targets_R[:, None], place_RK], dim=1)
    return place_RX.clamp(min=0), torch.cat([(given_R * alone_R)[:, None], given_RK], dim=1)


class _Chunks:
    """The output layer over some rows, which computes logits chunk by chunk, in one buffer except for kept chunks."""

    def __init__(
        self,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_R: Tensor,
        temperature_R: Tensor | None,
        dtype: torch.dtype,
        chunk: int | None,
    ) -> None:
        self.hidden_RH = hidden_RH.detach().to(dtype)
        self.weight_VH = weight_VH.detach().to(dtype)
        self.bias_V = None if bias_V is None else bias_V.detach().float()
        self.targets_R, self._temperature_R = targets_R, temperature_R
        step = chunk or chunk_rows(len(hidden_RH), weight_VH.shape[0], dtype)
        ends = [*range(step, len(hidden_RH), step), len(hidden_RH)]
        self.rows = [
            slice(start, end) for start, end in zip([0, *ends], ends, strict=False) if end > start
        ]
        self._buffer_CV: Tensor | None = None
        self._kept: dict[int, Tensor | None] = {}

    def keep(self, room: int) -> None:
        """Keep the logits of the first chunks, as many as fit into `room` bytes, until `kept_logits` takes them."""
        if self.rows:
            a_chunk = self.rows[0].stop * self.weight_VH.shape[0] * self.weight_VH.itemsize
            self._kept = dict.fromkeys(rows.start for rows in self.rows[: room // a_chunk])

    def logits(self, rows: slice) -> Tensor:
        """Return a chunk's matrix product [C, V] in the compute dtype; the next chunk overwrites it unless the chunk is kept."""
        if rows.start in self._kept:
            kept_CV = torch.mm(self.hidden_RH[rows], self.weight_VH.t())
            self._kept[rows.start] = kept_CV
            return kept_CV
        if self._buffer_CV is None:
            most = self.rows[0].stop
            self._buffer_CV = self.hidden_RH.new_empty(most, self.weight_VH.shape[0])
        out_CV = self._buffer_CV[: rows.stop - rows.start]
        return torch.mm(self.hidden_RH[rows], self.weight_VH.t(), out=out_CV)

    def kept_logits(self, rows: slice) -> Tensor:
        """Return a chunk's kept logits, which the caller may overwrite, or else recompute them."""
        kept_CV = self._kept.pop(rows.start, None)
        return self.logits(rows) if kept_CV is None else kept_CV

    def temperature(self, rows: slice) -> Tensor | None:
        """Return the temperatures of a chunk's rows, float32 [C]; None if all are 1."""
        return None if self._temperature_R is None else self._temperature_R[rows]

    def biased(self, logits_CV: Tensor) -> Tensor:
        """Return logits [C, V] plus the bias, to find the most likely token ids; the temperature would not change the order of logits."""
        return logits_CV if self.bias_V is None else logits_CV.float() + self.bias_V

    def scaled(self, rows: slice, values_CK: Tensor) -> Tensor:
        """Return values divided by the temperatures of their rows, float32 [C, K]."""
        return (
            values_CK
            if self._temperature_R is None
            else values_CK / self._temperature_R[rows, None]
        )

    def scaled_at(self, rows: slice, logits_CV: Tensor, place_CK: Tensor) -> Tensor:
        """Return the logits at some columns, with bias and temperature, float32 [C, K]."""
        z_CK = logits_CV.gather(1, place_CK).float()
        return self.scaled(rows, z_CK if self.bias_V is None else z_CK + self.bias_V[place_CK])

    def free(self) -> None:
        """Free the buffer."""
        self._buffer_CV = None


class _WeightGradient:
    """The weight gradient: a sum over chunks in float32, or in the weight's dtype for a single chunk. Padding rows are 0."""

    def __init__(self, weight_VH: Tensor, chunks: int, padding: int) -> None:
        self._alone = chunks == 1
        rows, width = weight_VH.shape
        dtype = weight_VH.dtype if self._alone else torch.float32
        make = torch.empty if self._alone and not padding else torch.zeros
        self.padded = make(rows + padding, width, dtype=dtype, device=weight_VH.device)
        self.sum_VH = self.padded[:rows]

    def add(self, grad_CV: Tensor, hidden_CH: Tensor) -> None:
        """Add gradᵀ · hidden."""
        sum_VH = self.sum_VH
        if self._alone:
            torch.mm(grad_CV.t(), hidden_CH, out=sum_VH)
        elif grad_CV.dtype == torch.float32:
            sum_VH.addmm_(grad_CV.t(), hidden_CH)
        elif sum_VH.is_cuda:
            # The matrix product's epilogue adds to float32, so that no product is written in half precision.
            torch.addmm(sum_VH, grad_CV.t(), hidden_CH, out_dtype=torch.float32, out=sum_VH)
        else:
            sum_VH += grad_CV.t() @ hidden_CH
