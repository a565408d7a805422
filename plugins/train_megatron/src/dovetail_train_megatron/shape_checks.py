"""Misfits: tensors of a checkpoint that are not those of the network which its config describes.

What fits in number of dimensions alone would be spread or cut by a copy, and what has no place be left out: either would train
another model than the rollout generates with, and say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dovetail.errors import ModelError
from dovetail.sections import ModelSection
from dovetail_train_megatron.names import Entry, TensorTable

if TYPE_CHECKING:
    from dovetail_train_megatron.network import Network

_IN_A_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_WORKED_OUT = "rotary_emb.inv_freq"
"""Old checkpoints store what every model works out for itself."""


def refuse_unplaced(
    names: Collection[str], network: Network, table: TensorTable, section: ModelSection
) -> None:
    """Check that the network has every tensor of the model's layers.

    Args:
        names: the names of the checkpoint's tensors.
        network: the network.
        table: the table of the network.
        section: the section with the checkpoint's path.

    Raises:
        ModelError: it lacks some, such as biases or the scales of quantised weights.
    """
    placed = {name for entry in table.entries for name in table.hf_names(entry)}
    layers = int(network.architecture.hf.num_hidden_layers)
    unplaced = [
        name
        for name in sorted(names)
        if (layer := _IN_A_LAYER.search(name)) is not None
        and int(layer[1]) < layers
        and not name.endswith(_WORKED_OUT)
        and not {name, f"model.{name}"} & placed
    ]
    if unplaced:
        raise ModelError(
            f"model {section.path!r} has tensors that the engine megatron does not support: {len(unplaced)}, "
            f"such as {unplaced[0]!r}",
            hint="use engine fsdp2; if they are scales of quantised weights, name the model before its quantisation",
        )


def refuse_misshapen(
    tensors: Mapping[str, Tensor], table: TensorTable, entry: Entry, section: ModelSection
) -> None:
    """Check that the checkpoint's tensors of an entry have the shapes that follow from the model's config.

    Args:
        tensors: as stored, whole, by the checkpoint's name, in the order of `TensorTable.hf_names`.
        table: has the composition of the entry.
        entry: the entry of the table, not a value head.
        section: the section with the checkpoint's path.

    Raises:
        ModelError: a tensor has another shape; names both.
    """
    parts = [torch.empty(entry.shape, device="meta")] * len(entry.holders)
    shapes = {name: tuple(tensor.shape) for name, tensor in table.to_hf(entry, parts)}
    for (name, tensor), known in zip(tensors.items(), table.hf_names(entry), strict=True):
        found = tuple(tensor.shape)
        if found != shapes[known]:
            raise ModelError(
                f"{name!r} of model {section.path!r} has shape {found}, and its config.json leads to {shapes[known]}",
                hint="config.json and weights are of different models: fetch or export it again",
            )
