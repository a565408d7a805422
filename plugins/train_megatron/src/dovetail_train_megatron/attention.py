"""Causal attention over packs, as a module in the place of Megatron's own, and the rotary positions that go with it.

Megatron passes every layer an `attention_mask`; here that is the number of the pack, under which all that attention must
know of it is found. A number goes through activation recomputation as it is, which runs long after other packs have come.
Context-parallel ranks exchange tokens for heads before attention and back after it (Ulysses, arXiv 2309.14509).

Legend: C context-parallel ranks, F tokens of the pack, T = F / C of this rank, H query heads, K key and value heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dovetail.training.sequences import Sequences, sent
from dovetail.training.varlen import attend
from dovetail_train_megatron.packs import Pack


class Packs:
    """The packs that are on their way through one model, by number."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequences] = {}

    def add(self, pack: Pack, device: torch.device) -> Tensor:
        """Keep a pack's sequences until `clear`: int64 [1] on the CPU, the number to pass for a mask."""
        number = len(self._sequences)
        self._sequences[number] = Sequences(pack.lengths_S.tolist(), device)
        return torch.tensor([number])

    def __getitem__(self, number: Tensor) -> Sequences:
        return self._sequences[int(number)]

    def clear(self) -> None:
        """Forget all packs: no backward pass will ask for them any more."""
        self._sequences.clear()


class PackedAttention(nn.Module):
    """Attention of one layer. It has no weights and no dropout.

    Megatron makes it with its own arguments; `packs` and `cp_group` are set once the model is there.
    """

    def __init__(
        self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)
        self.packs = Packs()
        self.cp_group: dist.ProcessGroup | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any
    ) -> Tensor:
        """Attend within each sequence of the pack.

        Args:
            query: float [T, 1, H, D].
            key: float [T, 1, K, D].
            value: float [T, 1, K, D].
            attention_mask: int64 [1], the pack's number.

        Returns:
            float [T, 1, H · D].
        """
        sequences = self.packs[attention_mask]
        states = (query[:, 0], key[:, 0], value[:, 0])
        if self.cp_group is None:
            attended_THD = attend(*states, sequences, scale=self.scale)
        else:
            whole = to_heads(*states, self.cp_group)
            attended_THD = to_tokens(attend(*whole, sequences, scale=self.scale), self.cp_group)
        return attended_THD.flatten(1)[:, None]


def to_heads(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of this rank's heads, from all heads of its tokens. Collective.

    Key and value heads are repeated where C does not divide them, each for the query heads that it serves.

    Returns:
        [F, H / C, D] and twice [F, K' / C, D], with K' the least multiple of K that C divides.
    """
    ranks = dist.get_world_size(group)
    repeats = math.lcm(key_TKD.shape[1], ranks) // key_TKD.shape[1]
    if repeats > 1:
        key_TKD = key_TKD.repeat_interleave(repeats, 1)
        value_TKD = value_TKD.repeat_interleave(repeats, 1)
    given = (query_THD, key_TKD, value_TKD)
    shapes = [(x.shape[1] // ranks, x.shape[2]) for x in given]
    # One message: the parts of each rank's heads side by side.
    flat_TCX = torch.cat([x.reshape(len(x), ranks, -1) for x in given], dim=-1)
    whole_FX = _exchanged(flat_TCX.transpose(0, 1), group).flatten(0, 1)
    parts = torch.split(whole_FX, [heads * size for heads, size in shapes], dim=-1)
    query, key, value = (
        torch.unflatten(x, -1, shape) for x, shape in zip(parts, shapes, strict=True)
    )
    return query, key, value


def to_tokens(attended_FHD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All heads of this rank's tokens, [F / C, H, D], from all tokens of its heads, [F, H / C, D]. Collective."""
    by_rank = torch.unflatten(attended_FHD, 0, (dist.get_world_size(group), -1))
    return _exchanged(by_rank, group).transpose(0, 1).flatten(1, 2)


def _exchanged(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[C, …]: the i-th part goes to rank i, and what comes from it takes its place. Carries the gradient."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    exchanged: Tensor = all_to_all_single_autograd(by_rank.contiguous(), None, None, group)
    return exchanged


class Rotary(nn.Module):
    """Rotary angles of the tokens that this rank holds, by the model's own frequencies (arXiv 2104.09864).

    It takes the place of Megatron's module, which counts positions from the start of a row. `positions_T` is set before
    every forward pass; the angles then travel as an argument of every layer.
    """

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies.float(), persistent=False)
        self.positions_T = torch.zeros(1, dtype=torch.int64)

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Megatron asks for it, and nothing depends on it."""
        return len(self.positions_T)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """float32 [T, 1, 1, D]: angles, those of the first half of a head's dimensions and again for the second."""
        frequencies: Tensor = self.frequencies  # type: ignore[assignment]
        angles = torch.outer(self.positions_T.float(), frequencies)
        return torch.cat([angles, angles], dim=-1)[:, None, None]

    def place(self, positions: Any) -> None:
        """Say where the next pass's tokens are, int64 [T] in NumPy."""
        self.positions_T = sent(positions, self.frequencies.device)  # type: ignore[arg-type]
