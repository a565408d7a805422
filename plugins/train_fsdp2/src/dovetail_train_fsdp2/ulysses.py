"""Sequence parallelism after Ulysses (arXiv 2309.14509): ranks share each pack, its tokens everywhere but in attention.

Each of C ranks takes F / C tokens of a pack through the model. Before attention an all-to-all gives it all tokens of
H / C heads, and after it all heads of its own tokens. Each scores its own tokens; the scores are gathered, so that
every rank sees them all. The gradient of a gathered score stays with the rank that made it: summed over ranks, the
parameters' gradients are those of one process.

Legend: C ranks, F tokens of the pack, H query heads, K key and value heads, D head size, E head size of the values,
R scored tokens, M scored tokens of the rank that has most.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.dispatch import Mesh
from dovetail.errors import ConfigError
from dovetail_train_fsdp2.layout import Layout, Packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AXIS = "cp"
"""The mesh's axis of ranks that share each pack."""


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """What one rank computes of a packed layout."""

    layout: Layout
    """With the rank's F / C tokens, the lengths of all sequences, and M scored tokens: its own, and stand-ins."""
    place_R: np.ndarray
    """int64 [R]: where each scored token of the whole lies among the ranks' C · M."""


class SequenceParallel:
    """The ranks that share each pack.

    Attributes:
        size: C.
        index: this rank's place among them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.index = dist.get_rank(group)

    def part(self, layout: Layout) -> Part:
        """This rank's part of a packed layout, padded at its end by a sequence of its own where C does not divide F."""
        fed = layout.fed
        assert isinstance(fed, Packed)
        count = -(-len(fed.ids_F) // self.size)
        more = count * self.size - len(fed.ids_F)
        responses_G = fed.responses_G
        if responses_G is not None and more:
            # What fills up comes last, where the last prompt's responses are.
            responses_G = responses_G + more * (np.arange(len(responses_G)) == len(responses_G) - 1)
        mine = slice(self.index * count, (self.index + 1) * count)
        owner_R, at_R = np.divmod(layout.source_R, count)
        scored_C = np.bincount(owner_R, minlength=self.size)
        # Every rank scores equally many: a weight that one of them did not touch would have no gradient there.
        most = max(1, int(scored_C.max()))
        order_R = np.argsort(owner_R, kind="stable")
        place_R = np.empty_like(order_R)
        within = np.arange(len(order_R)) - (np.cumsum(scored_C) - scored_C)[owner_R[order_R]]
        place_R[order_R] = owner_R[order_R] * most + within
        own = np.flatnonzero(owner_R == self.index)
        temperature_R = layout.temperature_R
        return Part(
            layout=attrs.evolve(
                layout,
                fed=attrs.evolve(
                    fed,
                    ids_F=np.pad(fed.ids_F, (0, more))[mine],
                    positions_F=np.concatenate([fed.positions_F, np.arange(more)])[mine],
                    lengths_S=np.append(fed.lengths_S, more) if more else fed.lengths_S,
                    responses_G=responses_G,
                ),
                source_R=_filled(at_R[own], most, 0),
                targets_R=_filled(layout.targets_R[own], most, 0),
                temperature_R=None
                if temperature_R is None
                else _filled(temperature_R[own], most, 1),
            ),
            place_R=place_R,
        )

    def whole(self, scores: dict[str, Tensor], part: Part) -> dict[str, Tensor]:
        """Every rank's scores, float32 [R] each, from this rank's [M]. Collective."""
        names = sorted(scores)
        gathered_CNM: Tensor = _Gathered.apply(  # type: ignore[no-untyped-call]
            torch.stack([scores[name] for name in names]), self.group, self.size, self.index
        )
        place_R = torch.from_numpy(part.place_R).to(gathered_CNM.device)
        whole_NR = gathered_CNM.transpose(0, 1).flatten(1).index_select(1, place_R)
        return dict(zip(names, whole_NR.unbind(), strict=True))

    def to_heads(
        self, query_THD: Tensor, key_TKD: Tensor, value_TKE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens of this rank's heads, from all heads of its T = F / C tokens. Collective.

        Key and value heads are repeated where C does not divide them, each for the query heads that it serves.

        Returns:
            [F, H / C, D], [F, K' / C, D] and [F, K' / C, E], with K' the least multiple of K that C divides.
        """
        repeats = math.lcm(key_TKD.shape[1], self.size) // key_TKD.shape[1]
        if repeats > 1:
            key_TKD = key_TKD.repeat_interleave(repeats, 1)
            value_TKE = value_TKE.repeat_interleave(repeats, 1)
        given = (query_THD, key_TKD, value_TKE)
        shapes = [(x.shape[1] // self.size, x.shape[2]) for x in given]
        # One message: the parts of each rank's heads side by side.
        flat_TCX = torch.cat([x.reshape(len(x), self.size, -1) for x in given], dim=-1)
        whole_FX = self._exchanged(flat_TCX.transpose(0, 1)).flatten(0, 1)
        parts = torch.split(whole_FX, [heads * size for heads, size in shapes], dim=-1)
        query, key, value = (
            torch.unflatten(x, -1, shape) for x, shape in zip(parts, shapes, strict=True)
        )
        return query, key, value

    def to_tokens(self, attended_FHE: Tensor) -> Tensor:
        """All heads of this rank's tokens, [F / C, H, E], from all tokens of its heads, [F, H / C, E]. Collective."""
        by_rank = torch.unflatten(attended_FHE, 0, (self.size, -1))
        return self._exchanged(by_rank).transpose(0, 1).flatten(1, 2)

    def _exchanged(self, by_rank: Tensor) -> Tensor:
        """[C, …]: the i-th part goes to rank i, and what comes from it takes its place. Carries the gradient."""
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        exchanged: Tensor = all_to_all_single_autograd(by_rank.contiguous(), None, None, self.group)
        return exchanged


def sequence_parallel(
    mesh: Mesh | None, rank: int, trunk: PreTrainedModel
) -> SequenceParallel | None:
    """The ranks that share packs with this one along the mesh's axis cp; None where it has them to itself.

    Collective over all ranks of the mesh, which are those of torch's default process group.

    Raises:
        ConfigError: there are more ranks than attention heads, or they do not divide them.
    """
    degree = 1 if mesh is None else mesh.axis_size(AXIS)
    if mesh is None or degree == 1:
        return None
    heads = int(trunk.config.get_text_config().num_attention_heads)
    if heads % degree:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"sequence_parallel_size {degree} does not divide the model's {heads} attention heads",
            hint=f"use one of {', '.join(map(str, fitting))}",
        )
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for other in range(mesh.size):
        at = mesh.coordinates(other)
        groups.setdefault(tuple((a, i) for a, i in at.items() if a != AXIS), []).append(other)
    # Every rank makes every group, in one order.
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups.values()}
    return SequenceParallel(next(group for ranks, group in made.items() if rank in ranks))


def _filled(values_R: np.ndarray, length: int, value: float) -> np.ndarray:
    """As many values as asked for, further ones all alike."""
    filled = np.full(length, value, values_R.dtype)
    filled[: len(values_R)] = values_R
    return filled


class _Gathered(torch.autograd.Function):
    """Every rank's tensor, stacked. Each rank keeps the gradient of its own: the others hold the same loss."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup, size: int, index: int) -> Tensor:
        ctx.index = index
        gathered = mine.new_empty(size, *mine.shape)
        dist.all_gather_into_tensor(gathered.flatten(0, 1), mine.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[ctx.index], None, None, None
