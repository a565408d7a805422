"""LowRankUpdate: the low-rank updates of one of Megatron's linear layers (arXiv 2106.09685), divided over ranks like the layer.

A layer of Megatron may fuse several layers of Hugging Face (queries, keys and values; gate and up). Each Hugging Face layer has its
own A and B, as in peft, so that adapters are interchangeable between engines:

    y = W x + s · fused(B_1 A_1 x, B_2 A_2 x, …)

If tensor-parallel ranks divide a layer by rows, each rank has the whole A and its rows of B. If they divide the layer by columns, each rank
has its columns of A and the whole B. Ranks exchange only A x, whose width is the adapter's rank. With sequence parallelism an undivided
matrix sees only this rank's tokens. Such a matrix is marked as Megatron marks its norms, so that its gradients are summed over ranks.

Legend: T tokens of this rank, I input and O output features of this rank, r rank of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from dovetail_train_megatron.needs import imported

Fuse = Callable[[Sequence[Tensor]], Tensor]
"""A function that combines the outputs of Hugging Face's layers, […, O_i] each, in the order of Megatron's fused layer, […, O]."""


@attrs.frozen(kw_only=True)
class LinearSlice:
    """One of the Hugging Face linear layers that a linear layer of Megatron fuses."""

    name: str
    """Name of the layer in a Hugging Face model, such as `model.layers.0.self_attn.q_proj`."""
    inputs: int
    """Number of input features on this rank, I."""
    outputs: int
    """Number of output features on this rank, O."""


class LowRankUpdate(nn.Module):
    """The adapter of one of Megatron's linear layers, whose output is added to that of the layer.

    Attributes:
        on: whether the adapter is applied.
        fuse: the function that combines the outputs of Hugging Face's layers in the order of Megatron's layer.
        by_rows: whether tensor parallelism divides the base weight by rows; else by columns.
        sequence_parallel: whether activations between tensor-parallel regions are divided by tokens.
    """

    def __init__(
        self,
        linears: Sequence[LinearSlice],
        adapted: Sequence[str],
        fuse: Fuse,
        *,
        rank: int,
        scale: float,
        divided: int,
        ranks: int,
        sequence_parallel: bool,
        device: torch.device,
    ) -> None:
        """Create A and B, float32; B is 0.

        Args:
            linears: the fused Hugging Face layers, in Megatron's order.
            adapted: the names of the layers that get an update; the others do not change.
            fuse: the function that combines the layers' outputs in the order of Megatron's layer.
            rank: r, the rank of each update.
            scale: s, the factor of each update.
            divided: the dimension of the base's weight that is divided: 0 rows, 1 columns.
            ranks: the number of tensor-parallel ranks.
            sequence_parallel: whether activations between tensor-parallel regions are divided by tokens.
            device: the device of the parameters.
        """
        super().__init__()
        self.on = True
        self._linears, self.fuse, self._scale = tuple(linears), fuse, scale
        self.by_rows, self._ranks = divided == 0, ranks
        self.sequence_parallel = sequence_parallel and ranks > 1
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        self._keys = {
            linear.name: linear.name.rpartition(".")[2]
            for linear in linears
            if linear.name in adapted
        }
        for linear in linears:
            if linear.name not in self._keys:
                continue
            key = self._keys[linear.name]
            a = nn.Parameter(torch.zeros(rank, linear.inputs, device=device))
            b = nn.Parameter(torch.zeros(linear.outputs, rank, device=device))
            part, whole, dim = (b, a, 0) if self.by_rows else (a, b, 1)
            if ranks > 1:
                part.tensor_model_parallel, part.partition_dim = True, dim  # type: ignore[attr-defined]
                part.partition_stride = 1  # type: ignore[attr-defined]
            whole.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
            self.a[key], self.b[key] = a, b

    def matrices(self) -> Mapping[str, tuple[nn.Parameter, nn.Parameter]]:
        """Return this rank's A [r, I] and B [O, r] of every adapted layer, by the layer's Hugging Face name."""
        return {name: (self.a[key], self.b[key]) for name, key in self._keys.items()}

    def update(self) -> Tensor:
        """Return the adapter's addition to this rank's shard of the base weight, float32 [O, I], without communication."""
        parts = [
            (self.b[key] @ self.a[key]).t() if key is not None else self._nothing(linear)
            for linear, key in self.pieces()
        ]
        return self.fuse(parts).t() * self._scale

    def forward(self, x: Tensor) -> Tensor:
        """Return the adapter's addition to the base layer's output. Collective over tensor-parallel ranks.

        Args:
            x: float [T, 1, I], the input of the base layer.

        Returns:
            [T, 1, O], for the same tokens as the base layer's output. With sequence parallelism these are the tokens of all ranks
            if `by_rows`, else this rank's tokens.
        """
        keys = list(self._keys.values())
        a = torch.cat([self.a[key] for key in keys]).to(x.dtype)
        low = self._exchanged(functional.linear(x, a))
        lows = dict(zip(keys, low.chunk(len(keys), dim=-1), strict=True))
        parts = [
            functional.linear(lows[key], self.b[key].to(x.dtype))
            if key is not None
            else low.new_zeros(*low.shape[:-1], linear.outputs)
            for linear, key in self.pieces()
        ]
        return self.fuse(parts) * self._scale

    def _exchanged(self, low: Tensor) -> Tensor:
        """Exchange A x over tensor-parallel ranks: gather all tokens, or sum over the ranks' columns."""
        if self._ranks == 1:
            return low
        mappings = imported("megatron.core.tensor_parallel.mappings")
        exchange: Callable[..., Tensor]
        if self.by_rows and self.sequence_parallel:
            exchange = mappings.gather_from_sequence_parallel_region
        elif self.by_rows:
            exchange = mappings.copy_to_tensor_model_parallel_region
        elif self.sequence_parallel:
            exchange = mappings.reduce_scatter_to_sequence_parallel_region
        else:
            exchange = mappings.reduce_from_tensor_model_parallel_region
        return exchange(low)

    def pieces(self) -> list[tuple[LinearSlice, str | None]]:
        """Return Hugging Face's layers in Megatron's order, each with the last component of its name, or with None if it has no update."""
        return [(linear, self._keys.get(linear.name)) for linear in self._linears]

    def _nothing(self, linear: LinearSlice) -> Tensor:
        device = next(iter(self.a.values())).device
        return torch.zeros(linear.inputs, linear.outputs, device=device)


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the outputs of the gate and up projections, or of a single layer, along the last dimension to […, O]."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)


def by_groups(groups: int) -> Fuse:
    """Return a function that orders queries, keys and values by attention group: each group's queries, then its key and value.

    Args:
        groups: the number of key and value heads on this rank.
    """

    def fuse(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(
            [torch.unflatten(part, -1, (groups, -1)) for part in parts], dim=-1
        ).flatten(-2)

    return fuse
