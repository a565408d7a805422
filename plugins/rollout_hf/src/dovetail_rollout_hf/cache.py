"""The KV cache of the running sequences, right-aligned in common columns.

Every row's newest token is in the same column, so that a step writes one column in place and reads one slice. Rows with shorter
prompts have padding on the left.

Legend: N rows, P prompts, H key and value heads, L prompt columns, C columns, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class Prefill:
    """The result of one forward pass over left-padded prompts.

    Attributes:
        logits_PV: float32 [P, V], the logits after each prompt's last token.
        keys: one tensor [P, H, L, D] per layer, for P prompts, H key-value heads, L columns and head width D.
        values: one tensor [P, H, L, D] per layer.
        shift_P: int64 [P], the offset of position ids after each prompt, since an image takes fewer positions than tokens; None
            without images.
    """

    logits_PV: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    shift_P: Tensor | None = None

    @property
    def columns(self) -> int:
        """The number of prompt columns, padding included."""
        return int(self.keys[0].shape[2])


@attrs.frozen(eq=False)
class Arrival:
    """New rows, each of which continues one prompt of a prefill."""

    prefill: Prefill
    prompts_M: Tensor
    """int64 [M]: index of the prompt that each new row continues."""


@attrs.define(eq=False)
class KvCache:
    """The KV cache: for every layer one tensor [N, H, C, D] of keys, and one of values (N rows, H heads, C columns, head width D)."""

    keys: list[Tensor] = attrs.field(factory=list)
    values: list[Tensor] = attrs.field(factory=list)
    _spare: list[Tensor] = attrs.field(factory=list)
    """Memory of earlier tensors, to be reused on CPUs: the C library would return it to the system, which then clears
    every page again. Accelerators' allocators reuse memory themselves."""

    def rebuild(
        self,
        *,
        kept_N: Tensor,
        span: tuple[int, int],
        end: int,
        capacity: int,
        arrivals: Sequence[Arrival],
    ) -> None:
        """Move the kept rows so that they end before column `end`, drop the other rows, and add new rows that end there, too.

        Args:
            kept_N: int64 [N], the indices of the rows to keep, in their new order.
            span: the first (inclusive) and last (exclusive) column that the kept rows use now.
            end: the column of the next token.
            capacity: the number of columns to allocate.
            arrivals: the new rows, which follow the kept rows.
        """
        layers = len(arrivals[0].prefill.keys) if arrivals else len(self.keys)
        rows = len(kept_N) + sum(len(arrival.prompts_M) for arrival in arrivals)
        for side in ("keys", "values"):
            tensors = getattr(self, side)
            for layer in range(layers):
                old = tensors[layer] if layer < len(tensors) else None
                sources = [(getattr(a.prefill, side)[layer], a.prompts_M) for a in arrivals]
                like = sources[0][0] if old is None else old
                new = self._take(like, (rows, like.shape[1], capacity, like.shape[3]))
                _fill(new, old, kept_N, span, end, sources)
                if layer < len(tensors):
                    tensors[layer] = new
                else:
                    tensors.append(new)
                if old is not None:
                    self._keep(old)

    def clear(self) -> None:
        """Drop every row, and keep the memory for later rows."""
        for tensor in (*self.keys, *self.values):
            self._keep(tensor)
        self.keys, self.values = [], []

    def release(self) -> int:
        """Free the memory that is kept for later rows, and return the number of freed bytes."""
        freed = sum(tensor.untyped_storage().nbytes() for tensor in self._spare)
        self._spare = []
        return freed

    def _take(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return an uninitialised tensor, in spare memory if that is large enough."""
        size = math.prod(shape)
        while self._spare:
            flat = self._spare.pop()
            if flat.numel() >= size and flat.dtype == like.dtype:
                return flat[:size].view(shape)
        return like.new_empty(size).view(shape)

    def _keep(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            size = storage.nbytes() // tensor.element_size()
            self._spare.append(tensor.as_strided((size,), (1,), 0))


def _fill(
    new: Tensor,
    old: Tensor | None,
    kept_N: Tensor,
    span: tuple[int, int],
    end: int,
    sources: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """Copy the kept rows and the prompts of new rows into `new`, so that they end before column `end`, with zeros to their left.

    Args:
        new: [N + M, H, C, D], the uninitialised tensor of keys or values of one layer.
        old: the layer's earlier tensor; None if there was none.
        kept_N: int64 [N], the indices of the rows to keep.
        span: the first (inclusive) and last (exclusive) column that the kept rows use in `old`.
        end: the column of the next token.
        sources: for each prefill, its tensor [P, H, L, D], and the index of the prompt that each new row continues.
    """
    kept = len(kept_N)
    if kept and old is not None:
        begin = end - (span[1] - span[0])
        new[:kept, :, begin:end] = old[:, :, span[0] : span[1]].index_select(0, kept_N)
        new[:kept, :, :begin].zero_()
    row = kept
    for source, prompts_M in sources:
        begin, stop = end - source.shape[2], row + len(prompts_M)
        new[row:stop, :, begin:end] = source.index_select(0, prompts_M)
        # Attention reads padding with weight 0; uninitialised memory could hold NaN, and 0 · NaN is NaN.
        new[row:stop, :, :begin].zero_()
        row = stop


def empty_index(device: torch.device) -> Tensor:
    """Return an empty tensor of row indices, int64 [0]."""
    return torch.empty(0, dtype=torch.int64, device=device)
