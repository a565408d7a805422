"""Sequence parallelism: dividing a packed layout among ranks. `dovetail_torch_engines.ulysses` has the exchange between ranks.

Legend: C ranks, F tokens of the pack, R scored tokens, M scored tokens of the rank with most.
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
"""The name of the mesh's axis along which each pack's tokens are divided among ranks."""


@attrs.frozen(kw_only=True, eq=False)
class RankLayout:
    """One rank's share of a packed layout."""

    layout: MicroBatchLayout
    """The layout of the rank's tokens: F / C on each of C ranks, of the pack's F tokens with padding. It has the lengths of all sequences.
    Its scored tokens are the rank's own, padded to M, the same number on every rank."""
    share: ScoredShare
    """The rank's share of the pack's scored tokens."""


class SequenceParallel:
    """A group of ranks that each hold a part of the tokens of every pack (packed micro-batch).

    Attributes:
        size: the number of ranks, C.
        index: this rank's index among these ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.index = dist.get_rank(group)

    def part(self, layout: MicroBatchLayout) -> RankLayout:
        """Return this rank's share of a packed layout; a last sequence of padding makes the ranks' shares equal."""
        fed = layout.fed
        assert isinstance(fed, PackedSequences)
        count = -(-len(fed.ids_F) // self.size)
        more = count * self.size - len(fed.ids_F)
        responses_G = fed.responses_G
        if responses_G is not None and more:
            # Filling tokens come last, and count as a response to the last prompt.
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
        """Gather the scores of all ranks by name: [R, …] for the pack's R scored tokens, from [M, …] of each rank. Collective.

        Args:
            scores: this rank's scores by name, for its M scored tokens and padding.
            part: this rank's share of the pack, as the method `part` returned it.
        """
        return part.share.whole(scores, self.group)


def check_heads(trunk: PreTrainedModel, degree: int) -> None:
    """Check that `degree` ranks can divide a model's attention heads evenly.

    Raises:
        ConfigError: `degree` does not divide the number of attention heads.
    """
    heads = int(trunk.config.get_text_config().num_attention_heads)
    if heads % degree:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"sequence_parallel_size={degree} does not divide the model's {heads} attention heads",
            hint=f"use one of {', '.join(map(str, fitting))}",
        )


def sequence_parallel(
    mesh: Mesh | None, rank: int, trunk: PreTrainedModel
) -> SequenceParallel | None:
    """Return this rank's group along the mesh's axis `cp`; None if the axis has one rank.

    Each rank of the group holds a part of every pack (packed micro-batch).

    Collective over all ranks of the mesh, which must be torch's default process group.

    Args:
        mesh: the engine's mesh; None for one rank.
        rank: this rank's index in the mesh.
        trunk: the model, whose number of attention heads is checked.

    Raises:
        ConfigError: the ranks do not divide the attention heads; see `check_heads`.
    """
    degree = 1 if mesh is None else mesh.axis_size(AXIS)
    if mesh is None or degree == 1:
        return None
    check_heads(trunk, degree)
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for other in range(mesh.size):
        at = mesh.coordinates(other)
        groups.setdefault(tuple((a, i) for a, i in at.items() if a != AXIS), []).append(other)
    # `new_group` is collective: every rank makes every group, in one order.
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups.values()}
    return SequenceParallel(next(group for ranks, group in made.items() if rank in ranks))
