"""Ranks that share each pack: their parts of a layout. The exchange between them is in `dovetail_torch_engines.ulysses`.

Legend: C ranks, F tokens of the pack, R scored tokens, M scored tokens of the rank that has most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch.distributed as dist
from torch import Tensor

from dovetail.dispatch import Mesh
from dovetail.errors import ConfigError
from dovetail_torch_engines import ScoredShare
from dovetail_train_fsdp2.layout import MicroBatchLayout, PackedSequences

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AXIS = "cp"
"""The mesh's axis of ranks that share each pack."""


@attrs.frozen(kw_only=True, eq=False)
class RankLayout:
    """One rank's part of a packed layout."""

    layout: MicroBatchLayout
    """The layout of the rank's F / C tokens, with the lengths of all sequences and M scored tokens: its own, then stand-ins."""
    share: ScoredShare
    """The rank's share of the pack's scored tokens."""


class SequenceParallel:
    """The ranks that share each pack.

    Attributes:
        size: the number of ranks, C.
        index: this rank's place among them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.index = dist.get_rank(group)

    def part(self, layout: MicroBatchLayout) -> RankLayout:
        """Return this rank's part of a packed layout; where C does not divide F a last sequence of padding is added."""
        fed = layout.fed
        assert isinstance(fed, PackedSequences)
        count = -(-len(fed.ids_F) // self.size)
        more = count * self.size - len(fed.ids_F)
        responses_G = fed.responses_G
        if responses_G is not None and more:
            # What fills up comes last, where the last prompt's responses are.
            responses_G = responses_G + more * (np.arange(len(responses_G)) == len(responses_G) - 1)
        mine = slice(self.index * count, (self.index + 1) * count)
        share = ScoredShare.of(layout.source_R, count, rank=self.index, ranks=self.size)
        temperature_R = layout.temperature_R
        return RankLayout(
            layout=attrs.evolve(
                layout,
                fed=attrs.evolve(
                    fed,
                    ids_F=np.pad(fed.ids_F, (0, more))[mine],
                    positions_F=np.concatenate([fed.positions_F, np.arange(more)])[mine],
                    lengths_S=np.append(fed.lengths_S, more) if more else fed.lengths_S,
                    responses_G=responses_G,
                ),
                source_R=share.source_M,
                targets_R=share.filled(layout.targets_R, 0),
                temperature_R=None if temperature_R is None else share.filled(temperature_R, 1),
                read={name: share.filled(values_R, 0) for name, values_R in layout.read.items()},
            ),
            share=share,
        )

    def whole(self, scores: dict[str, Tensor], part: RankLayout) -> dict[str, Tensor]:
        """Return every rank's scores, [R, …] each, from this rank's [M, …]. Collective."""
        return part.share.whole(scores, self.group)


def check_heads(trunk: PreTrainedModel, degree: int) -> None:
    """Check that `degree` ranks can divide a model's attention heads.

    Raises:
        ConfigError: there are more ranks than attention heads, or the heads are not divisible.
    """
    heads = int(trunk.config.get_text_config().num_attention_heads)
    if heads % degree:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"sequence_parallel_size {degree} does not divide the model's {heads} attention heads",
            hint=f"use one of {', '.join(map(str, fitting))}",
        )


def sequence_parallel(
    mesh: Mesh | None, rank: int, trunk: PreTrainedModel
) -> SequenceParallel | None:
    """Return the ranks that share packs with this one along the mesh's axis cp; None where packs are not shared.

    Collective over all ranks of the mesh, which are those of torch's default process group.

    Raises:
        ConfigError: see `check_heads`.
    """
    degree = 1 if mesh is None else mesh.axis_size(AXIS)
    if mesh is None or degree == 1:
        return None
    check_heads(trunk, degree)
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for other in range(mesh.size):
        at = mesh.coordinates(other)
        groups.setdefault(tuple((a, i) for a, i in at.items() if a != AXIS), []).append(other)
    # Every rank makes every group, in one order.
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups.values()}
    return SequenceParallel(next(group for ranks, group in made.items() if rank in ranks))
