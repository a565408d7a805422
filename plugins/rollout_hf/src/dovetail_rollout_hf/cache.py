"""Keys and values of the running sequences, right-aligned in common columns.

Every row's newest token stands in the same column, so that a step writes one column in place and
reads one slice; a row that began with a shorter prompt has padding on its left.

Legend: N rows, P prompts, H key and value heads, L prompt columns, C columns, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class Prefill:
    """What a pass over left-padded prompts leaves behind.

    Attributes:
        logits_PV: float32 [P, V], at each prompt's last token.
        keys: a tensor [P, H, L, D] a layer.
        values: a tensor [P, H, L, D] a layer.
    """

    logits_PV: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def columns(self) -> int:
        """Prompt columns, padding included."""
        return int(self.keys[0].shape[2])


@attrs.frozen(eq=False)
class Arrival:
    """New rows: each continues one prompt of a prefill."""

    prefill: Prefill
    prompts_M: Tensor
    """int64 [M]: index of the prompt that each new row continues."""


@attrs.define(eq=False)
class KvCache:
    """One tensor [N, H, C, D] a layer for keys, and one for values."""

    keys: list[Tensor] = attrs.field(factory=list)
    values: list[Tensor] = attrs.field(factory=list)

    def rebuild(
        self,
        *,
        kept_N: Tensor,
        span: tuple[int, int],
        end: int,
        capacity: int,
        arrivals: Sequence[Arrival],
    ) -> None:
        """Keep some rows, moved so that they end at column `end`, and let new rows end there too.

        Args:
            kept_N: int64 [N], the rows to keep, in their new order.
            span: first and last-plus-one column that the kept rows use now.
            end: column in which the next token goes.
            capacity: columns to make room for.
            arrivals: new rows, below the kept ones.
        """
        layers = len(arrivals[0].prefill.keys) if arrivals else len(self.keys)
        for layer in range(layers):
            for store, field in ((self.keys, "keys"), (self.values, "values")):
                old = store[layer] if layer < len(store) else None
                sources = [(getattr(a.prefill, field)[layer], a.prompts_M) for a in arrivals]
                new = _rebuilt(old, kept_N, span, end, capacity, sources)
                if layer < len(store):
                    store[layer] = new
                else:
                    store.append(new)

    def clear(self) -> int:
        """Drop everything; returns the bytes freed."""
        freed = sum(tensor.nbytes for tensor in (*self.keys, *self.values))
        self.keys, self.values = [], []
        return freed


def _rebuilt(
    old: Tensor | None,
    kept_N: Tensor,
    span: tuple[int, int],
    end: int,
    capacity: int,
    sources: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    like = sources[0][0] if old is None else old
    kept = len(kept_N)
    rows = kept + sum(len(prompts_M) for _, prompts_M in sources)
    new = like.new_empty((rows, like.shape[1], capacity, like.shape[3]))
    if kept and old is not None:
        begin = end - (span[1] - span[0])
        new[:kept, :, begin:end] = old[:, :, span[0] : span[1]].index_select(0, kept_N)
        new[:kept, :, :begin].zero_()
    row = kept
    for source, prompts_M in sources:
        begin, stop = end - source.shape[2], row + len(prompts_M)
        new[row:stop, :, begin:end] = source.index_select(0, prompts_M)
        # Padding is read with weight 0: it must be finite, so uninitialised memory will not do.
        new[row:stop, :, :begin].zero_()
        row = stop
    return new


def empty_index(device: torch.device) -> Tensor:
    """int64 [0]: no rows."""
    return torch.empty(0, dtype=torch.int64, device=device)
