"""Sequences: the boundaries of a pack's sequences, and their padding for kernels that need equal lengths.

Legend: T tokens, S sequences, B sequences of a bucket, L their padded length, N padded tokens of all buckets.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

LOOSE = 0.5
"""Smallest ratio of a sequence's length to the longest in its bucket; sequences up to `SHORT` share one bucket anyway."""
SHORT = 64
"""Sequences up to this length share one bucket, since a kernel launch costs more than its work on them."""


def sent(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device, as a tensor of its shape and dtype, without waiting for the device's queue."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # A copy from unpinned memory would wait for the device's queue. The pinned copy may be dropped at once: torch's host
    # allocator does not reuse the memory before the transfer is done.
    return tensor.pin_memory().to(device, non_blocking=True)


class Sequences:
    """S sequences end to end, on one device.

    Attributes:
        lengths: the length of each sequence.
        longest: the largest length.
        even: whether all sequences have the same length.
    """

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        """Lay out S sequences end to end.

        Args:
            lengths: the lengths of the S sequences, in order.
            device: the device of the tensors that will be attended to.
        """
        self.lengths = lengths
        self.longest = max(lengths)
        self.even = min(lengths) == self.longest
        offsets_S1 = np.cumsum([0, *lengths], dtype=np.int32)
        self.offsets_S1: Tensor = sent(offsets_S1, device)
        """int32 [S + 1], the offsets at which sequences begin, and the end of the last sequence."""

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def buckets(self) -> Buckets:
        """The sequences in padded buckets, for kernels that take only equal lengths; computed once for all layers."""
        return Buckets(self.lengths, self.offsets_S1.device)


class Buckets:
    """Sequences padded on the right. Each bucket, one padded tensor, holds sequences of similar length."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        lengths_S = np.asarray(lengths)
        starts_S = np.cumsum(lengths_S) - lengths_S
        self._shapes: list[tuple[int, int]] = []
        slot_T = np.empty(int(lengths_S.sum()), np.int64)
        taken = 0
        for rows in _grouped(lengths_S):
            longest = int(lengths_S[rows].max())
            for place, row in enumerate(rows):
                length = lengths_S[row]
                first = taken + place * longest
                slot_T[starts_S[row] : starts_S[row] + length] = np.arange(first, first + length)
            self._shapes.append((len(rows), longest))
            taken += len(rows) * longest
        self._size = taken
        in_place = taken == len(slot_T) and bool((slot_T == np.arange(taken)).all())
        self._slot_T = None if in_place else sent(slot_T, device)

    def spread(self, x_TXD: Tensor) -> list[Tensor]:
        """Return tokens [T, X, D] as one padded tensor [B, L, X, D] for each bucket; padding is 0."""
        padded = x_TXD if self._slot_T is None else _Spread.apply(x_TXD, self._slot_T, self._size)  # type: ignore[no-untyped-call]
        parts = torch.split(padded, [rows * longest for rows, longest in self._shapes])
        return [
            torch.unflatten(part, 0, shape) for part, shape in zip(parts, self._shapes, strict=True)
        ]

    def gathered(self, x_NXD: Tensor) -> Tensor:
        """Return the tokens without padding, [T, X, D], from the concatenated tokens of all buckets, [N, X, D]."""
        if self._slot_T is None:
            return x_NXD
        return _Gathered.apply(x_NXD, self._slot_T)  # type: ignore[no-untyped-call]


def _grouped(lengths_S: np.ndarray) -> list[np.ndarray]:
    """Return the indices of each bucket's sequences, ascending."""
    if lengths_S.max() <= SHORT:
        return [np.arange(len(lengths_S))]
    order = np.argsort(-lengths_S, kind="stable")
    groups: list[list[int]] = []
    least = 0.0
    for row in order:
        if not groups or lengths_S[row] < least:
            groups.append([])
            least = max(LOOSE * lengths_S[row], 1)
            if lengths_S[row] <= SHORT:
                least = 1
        groups[-1].append(int(row))
    return [np.sort(np.array(group)) for group in groups]


class _Spread(torch.autograd.Function):
    """Copy of row t to row `slot_T[t]` of a tensor of zeros. No two rows have the same slot, so the gradient only selects rows."""

    @staticmethod
    def forward(ctx: Any, x_TXD: Tensor, slot_T: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(slot_T)
        return x_TXD.new_zeros(size, *x_TXD.shape[1:]).index_copy_(0, slot_T, x_TXD)

    @staticmethod
    def backward(ctx: Any, grad_NXD: Tensor) -> tuple[Tensor, None, None]:
        (slot_T,) = ctx.saved_tensors
        return grad_NXD.index_select(0, slot_T), None, None


class _Gathered(torch.autograd.Function):
    """Selection of the rows `slot_T`, each at most once; the gradient copies rows into a tensor of zeros, and adds nothing up."""

    @staticmethod
    def forward(ctx: Any, x_NXD: Tensor, slot_T: Tensor) -> Tensor:
        ctx.save_for_backward(slot_T)
        ctx.size = len(x_NXD)
        return x_NXD.index_select(0, slot_T)

    @staticmethod
    def backward(ctx: Any, grad_TXD: Tensor) -> tuple[Tensor, None]:
        (slot_T,) = ctx.saved_tensors
        grad_NXD = grad_TXD.new_zeros(ctx.size, *grad_TXD.shape[1:])
        return grad_NXD.index_copy_(0, slot_T, grad_TXD), None
