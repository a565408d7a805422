"""Magnitudes: the norms of a weight's rows, trained apart from the rows' directions (DoRA, arXiv 2402.09353).

The rows of W + s · B A are scaled to the norms m, which start as the norms of the rows of W:

    y = g ⊙ (W + s · B A) x + bias,        g = m / ‖W + s · B A‖

As in peft the gradient treats the norm as a constant. If the layer is divided by rows, each rank has whole rows and their part of
m. If it is divided by columns, ranks add up the squares of their columns, and each rank has the whole m.

Legend: O output features of this rank, I input features of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dovetail_train_megatron.low_rank import LowRankUpdate


class Magnitudes(nn.Module):
    """DoRA's trained magnitudes for the adapted Hugging Face layers that one of Megatron's linear layers fuses.

    Attributes:
        m: the magnitudes, float32 [O] each, by the last component of the layer's name.
    """

    def __init__(self, updates: LowRankUpdate, base: Any, group: dist.ProcessGroup | None) -> None:
        """Allocate the magnitudes; `start` fills them after the base's weights are loaded.

        Args:
            updates: the updates of the same layer.
            base: Megatron's layer.
            group: the tensor-parallel ranks; None for a single rank.
        """
        super().__init__()
        # A tuple, so that neither becomes a submodule: both belong to the layer already.
        self._of = (updates, base)
        self._group = None if updates.by_rows else group
        self.m = nn.ParameterDict()
        for linear, key in updates.pieces():
            if key is None:
                continue
            m = nn.Parameter(torch.zeros(linear.outputs, device=updates.a[key].device))
            if not updates.by_rows:
                m.sequence_parallel = updates.sequence_parallel  # type: ignore[attr-defined]
            elif group is not None:
                m.tensor_model_parallel, m.partition_dim = True, 0  # type: ignore[attr-defined]
                m.partition_stride = 1  # type: ignore[attr-defined]
            self.m[key] = m

    @torch.no_grad()
    def start(self) -> None:
        """Set the magnitudes to the current norms of the weight's rows. Collective over tensor-parallel ranks."""
        for key, norms in self._split(self._norms()).items():
            if key in self.m:
                self.m[key].copy_(norms)

    def vectors(self) -> Mapping[str, nn.Parameter]:
        """Return this rank's magnitudes [O] of every adapted layer, by the layer's Hugging Face name."""
        updates, _ = self._of
        return {linear.name: self.m[key] for linear, key in updates.pieces() if key is not None}

    def factor(self) -> Tensor:
        """Return the factor g of each row of the weight, float32 [O] in Megatron's order. Collective over tensor-parallel ranks.

        g = m / ‖W + s · B A‖, with m the row's magnitude, W the base weight and s the adapter's scale; 1 for layers without an update.
        """
        updates, _ = self._of
        with torch.no_grad():
            norms = self._norms()
            own = self._split(norms)
        names = [linear.name.rpartition(".")[2] for linear, _ in updates.pieces()]
        return updates.fuse([self.m[n] if n in self.m else own[n] for n in names]) / norms

    def applied(self, output: Tensor, update: Tensor) -> Tensor:
        """Return the layer's output with DoRA, [T, 1, O]: the base's output plus the update, scaled by the rows' factors (see `factor`).

        Args:
            output: the output of the base layer, [T, 1, O].
            update: the adapter's addition to it, [T, 1, O].
        """
        _, base = self._of
        g = self.factor()
        inside = base.bias is not None and not base.skip_bias_add
        product: Tensor = output - base.bias if inside else output
        return output + (g - 1).to(output.dtype) * product + g.to(output.dtype) * update

    def _norms(self) -> Tensor:
        """Return ‖W + s · B A‖ of every row, float32 [O]."""
        updates, base = self._of
        weight: Tensor = base.weight.detach()
        squares = (weight.float() + updates.update()).square().sum(1)
        if self._group is not None:
            dist.all_reduce(squares, group=self._group)
        return squares.sqrt()

    def _split(self, fused_O: Tensor) -> dict[str, Tensor]:
        """Split values [O], in the order of Megatron's fused layer, into those of each Hugging Face layer, by the last part of its name."""
        updates, _ = self._of
        linears = [linear for linear, _ in updates.pieces()]
        sizes = [linear.outputs for linear in linears]
        places = torch.arange(sum(sizes), device=fused_O.device)
        flat_O = torch.empty_like(fused_O)
        flat_O[updates.fuse(torch.split(places, sizes))] = fused_O
        names = [linear.name.rpartition(".")[2] for linear in linears]
        return dict(zip(names, torch.split(flat_O, sizes), strict=True))
