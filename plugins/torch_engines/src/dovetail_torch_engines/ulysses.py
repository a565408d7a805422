"""Ulysses sequence parallelism (arXiv 2309.14509): ranks divide the tokens of a pack, and in attention the heads.

Each of C ranks takes F / C neighbouring tokens of a pack through the model. Before attention an all-to-all gives each rank all
tokens of H / C heads; afterwards another returns all heads of the rank's own tokens. Each rank scores its own tokens, and all ranks
gather the scores. The gradient of a gathered score goes only to the rank that computed the score. The parameters' gradients, summed
over ranks, thus equal those of one process.

Legend: C ranks, F tokens of the pack, T = F / C tokens of one rank, H query heads, K key and value heads, D head size, E head size
of the values, N values of a token over all scores, R scored tokens of the pack, M scored tokens of the rank with most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dovetail_torch_engines.sequences import sent


def to_heads(
    query_THD: Tensor, key_TKD: Tensor, value_TKE: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Send all heads of this rank's T tokens, and return this rank's heads of all F tokens, by an all-to-all.

    Collective and differentiable.

    If C, the number of ranks, does not divide the key and value heads, these are repeated.

    Args:
        query_THD: float [T, H, D]; C divides H.
        key_TKD: float [T, K, D].
        value_TKE: float [T, K, E].
        group: the C ranks.

    Returns:
        [F, H / C, D], [F, K' / C, D] and [F, K' / C, E], with K' the least multiple of K that C divides.
    """
    ranks = dist.get_world_size(group)
    repeats = math.lcm(key_TKD.shape[1], ranks) // key_TKD.shape[1]
    if repeats > 1:
        key_TKD = key_TKD.repeat_interleave(repeats, 1)
        value_TKE = value_TKE.repeat_interleave(repeats, 1)
    given = (query_THD, key_TKD, value_TKE)
    shapes = [(x.shape[1] // ranks, x.shape[2]) for x in given]
    # Query, key and value are concatenated by target rank, so that one all-to-all exchanges all three.
    flat_TCX = torch.cat([x.reshape(len(x), ranks, -1) for x in given], dim=-1)
    whole_FX = _exchanged(flat_TCX.transpose(0, 1), group).flatten(0, 1)
    parts = torch.split(whole_FX, [heads * size for heads, size in shapes], dim=-1)
    query, key, value = (
        torch.unflatten(x, -1, shape) for x, shape in zip(parts, shapes, strict=True)
    )
    return query, key, value


def to_tokens(attended_FHE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send this rank's heads of all F tokens, [F, H / C, E] for C ranks, and return all heads of this rank's T tokens, [T, H, E].

    The inverse of `to_heads`; collective and differentiable.
    """
    by_rank = torch.unflatten(attended_FHE, 0, (dist.get_world_size(group), -1))
    return _exchanged(by_rank, group).transpose(0, 1).flatten(1, 2)


@attrs.frozen(kw_only=True, eq=False)
class ScoredShare:
    """The scored tokens of one rank, padded to M, the largest number of any rank."""

    own: np.ndarray
    """int64, at most M: indices of the rank's own scored tokens among the pack's R scored tokens."""
    source_M: np.ndarray
    """int64 [M]: position, among the rank's T tokens, from which each scored token is predicted; 0 for padding."""
    place_R: np.ndarray
    """int64 [R]: index of each scored token of the pack among the gathered scores: M of every rank, concatenated in the order of ranks."""

    @classmethod
    def of(cls, source_R: np.ndarray, tokens: int, *, rank: int, ranks: int) -> ScoredShare:
        """Return one rank's share of the scored tokens.

        Args:
            source_R: int64 [R], the position, among the pack's F tokens, from which each scored token is predicted.
            tokens: T, the number of tokens of one rank.
            rank: the rank whose share is returned.
            ranks: C, the number of ranks.
        """
        owner_R, at_R = np.divmod(source_R, tokens)
        scored_C = np.bincount(owner_R, minlength=ranks)
        # Every rank scores equally many tokens, at least one: without any, a weight would have no gradient on that rank.
        most = max(1, int(scored_C.max(initial=0)))
        order_R = np.argsort(owner_R, kind="stable")
        within = np.arange(len(order_R)) - (np.cumsum(scored_C) - scored_C)[owner_R[order_R]]
        place_R = np.empty_like(order_R)
        place_R[order_R] = owner_R[order_R] * most + within
        own = np.flatnonzero(owner_R == rank)
        return cls(own=own, source_M=_filled(at_R[own], most, 0), place_R=place_R)

    def filled(self, values_R: np.ndarray, stand_in: float) -> np.ndarray:
        """Return those of the pack's R values that belong to the rank's own tokens, padded with `stand_in` to [M, …], in the same dtype."""
        return _filled(values_R[self.own], len(self.source_M), stand_in)

    def whole(
        self, scores: Mapping[str, Tensor], group: dist.ProcessGroup | None
    ) -> dict[str, Tensor]:
        """Gather the scores of all ranks by name, [R, …] each, from this rank's [M, …]; float32, or int32 without a gradient.

        Collective over `group`, which is None for a single rank.
        """
        names = sorted(scores)
        # All scores are sent in one all-gather: integers as floats of the same bits, which are only copied.
        rows = [_as_float(scores[name]).reshape(len(self.source_M), -1).t() for name in names]
        scores_NM = torch.cat(rows)
        if group is not None:
            gathered_CNM: Tensor = _Gathered.apply(  # type: ignore[no-untyped-call]
                scores_NM, group, dist.get_world_size(group), dist.get_rank(group)
            )
            scores_NM = gathered_CNM.transpose(0, 1).flatten(1)
        scores_NR = scores_NM.index_select(1, sent(self.place_R, scores_NM.device))
        parts = torch.split(scores_NR, [len(row) for row in rows])
        return {name: _like(part, scores[name]) for name, part in zip(names, parts, strict=True)}


def _filled(values: np.ndarray, length: int, value: float) -> np.ndarray:
    filled = np.full((length, *values.shape[1:]), value, values.dtype)
    filled[: len(values)] = values
    return filled


def _as_float(scores: Tensor) -> Tensor:
    """Return scores as float32; int32 values are reinterpreted bit by bit, so that `_like` can turn them back into integers."""
    return scores if scores.dtype == torch.float32 else scores.view(torch.float32)


def _like(scores_NR: Tensor, own: Tensor) -> Tensor:
    """Return gathered scores as [R, …], in the dtype and inner shape of a rank's own scores [M, …]."""
    if own.dtype != torch.float32:
        scores_NR = scores_NR.detach().contiguous().view(own.dtype)
    return scores_NR.t().reshape(-1, *own.shape[1:])


def _exchanged(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange parts [C, …]: part i goes to rank i, and is replaced by the part from rank i. Differentiable."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    return all_to_all_single_autograd(by_rank.contiguous(), None, None, group)


class _Gathered(torch.autograd.Function):
    """All-gather of the ranks' tensors, stacked. Each rank keeps only its own tensor's gradient: all ranks compute the same loss."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup, size: int, index: int) -> Tensor:
        ctx.index = index
        gathered = mine.new_empty(size, *mine.shape)
        dist.all_gather_into_tensor(gathered.flatten(0, 1), mine.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[ctx.index], None, None, None
