"""Causal attention over packs, with rotary positions, as a module that replaces Megatron's attention.

Megatron passes every layer an `attention_mask`. This engine passes the index of a pack in a `PackRegistry` instead, and attention
looks up the pack by this index. The index stays valid in activation recomputation, which runs after later packs have been added.
Rotary angles depend only on the pack: their cosines and sines are computed once for all layers. Context-parallel ranks exchange
tokens for heads before attention, and heads for tokens afterwards (`dovetail_torch_engines.ulysses`).

Legend: T tokens of this rank, H query heads, K key and value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dovetail_torch_engines import Sequences, attend, sent, to_heads, to_tokens
from dovetail_train_megatron.packs import PackedMicroBatch

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@attrs.frozen(kw_only=True, eq=False)
class Fed:
    """Sequences and rotary angles of one pack (packed micro-batch), as attention needs them."""

    sequences: Sequences
    """The boundaries of the whole pack's sequences, over all ranks among which the pack is divided."""
    cos_T1D: Tensor
    """Cosines of the rotary angles of this rank's tokens, [T, 1, D] in the model's dtype; each angle occurs twice, for both halves
    of a head."""
    sin_T1D: Tensor
    """Sines of the rotary angles, [T, 1, D], as `cos_T1D`."""


class PackRegistry:
    """The packs (packed micro-batches) in a model's current forward and backward passes, by index in the order of `add`."""

    def __init__(self, frequencies: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        """Create an empty registry.

        Args:
            frequencies: the rotary frequencies (arXiv 2104.09864), float32 [D / 2].
            dtype: the dtype of queries and keys.
            device: the device of the model.
        """
        self._frequencies, self._dtype, self._device = frequencies.to(device), dtype, device
        self._fed: dict[int, Fed] = {}

    def add(self, pack: PackedMicroBatch, mine: slice) -> Tensor:
        """Store a pack until `clear`, and return its index, int64 [1] on the CPU, to be passed to the layers in place of a mask.

        Args:
            pack: the pack, the same on all context-parallel ranks.
            mine: the range of the pack's tokens that this rank holds.
        """
        number = len(self._fed)
        positions_T = sent(pack.positions_F[mine], self._device).float()
        angles = torch.outer(positions_T, self._frequencies)
        angles_T1D = torch.cat([angles, angles], dim=-1)[:, None]
        self._fed[number] = Fed(
            sequences=Sequences(pack.lengths_S.tolist(), self._device),
            cos_T1D=angles_T1D.cos().to(self._dtype),
            sin_T1D=angles_T1D.sin().to(self._dtype),
        )
        return torch.tensor([number])

    def __getitem__(self, number: Tensor) -> Fed:
        return self._fed[int(number)]

    def clear(self) -> None:
        """Drop all packs; called when no backward pass needs them any longer."""
        self._fed.clear()


class PackedAttention(nn.Module):
    """Attention of one layer over a pack, without weights or dropout.

    Megatron constructs this module with Megatron's arguments; `packs` and `cp_group` are set after the model is built.
    """

    packs: PackRegistry

    def __init__(
        self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)
        self.cp_group: dist.ProcessGroup | None = None
        # The same setting also turns on compiled pointwise operations in Megatron's own layers.
        self._rotate = _compiled() if config.bias_activation_fusion else rotated

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any
    ) -> Tensor:
        """Return causal attention within each sequence of the pack.

        Args:
            query: float [T, 1, H, D], without rotary positions.
            key: float [T, 1, K, D], without rotary positions.
            value: float [T, 1, K, D].
            attention_mask: int64 [1], the pack's index in the `PackRegistry`.

        Returns:
            float [T, 1, H · D].
        """
        fed = self.packs[attention_mask]
        query_THD, key_TKD = self._rotate(query[:, 0], key[:, 0], fed.cos_T1D, fed.sin_T1D)
        states = (query_THD, key_TKD, value[:, 0])
        if self.cp_group is None:
            attended_THD = attend(*states, fed.sequences, scale=self.scale)
        else:
            whole = to_heads(*states, self.cp_group)
            attended = attend(*whole, fed.sequences, scale=self.scale)
            attended_THD = to_tokens(attended, self.cp_group)
        return attended_THD.flatten(1)[:, None]


def rotated(
    query_THD: Tensor, key_TKD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor
) -> tuple[Tensor, Tensor]:
    """Return queries and keys with rotary positions applied: x cos + (−x₂, x₁) sin for the halves x₁ and x₂ of a head.

    Args:
        query_THD: float [T, H, D].
        key_TKD: float [T, K, D].
        cos_T1D: the cosines of the angles, [T, 1, D] in the same dtype.
        sin_T1D: the sines of the angles, in the same dtype and shape.
    """

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos_T1D + torch.cat([-second, first], dim=-1) * sin_T1D

    return turned(query_THD), turned(key_TKD)


@cache
def _compiled() -> Rotate:
    """Compile `rotated` to one kernel for packs of any length."""
    return torch.compile(rotated, dynamic=True)
