"""Loading and gathering weights, tensor by tensor: from a checkpoint's files to every rank's shards, and from the shards to the senders.

No rank ever holds the whole model. To gather a tensor, the tensor-parallel ranks of a stage send their shards to the stage's first
rank. This rank sends the whole tensor to rank 0, or to all ranks if each machine has a sender. Checkpoints with tensors of another
shape, or with tensors that the network lacks, are refused: copying would broadcast or cut the tensors, and the trained model would
differ from the rollout's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dovetail.errors import ModelError
from dovetail.interfaces import TensorSpec, WeightManifest
from dovetail.sections import ModelSection
from dovetail_torch_engines import StoredCheckpoint, stored_value_head, wire_name
from dovetail_train_megatron.names import VALUE_HEAD, Entry, TensorTable

if TYPE_CHECKING:
    from dovetail_train_megatron.adapter import MegatronAdapter
    from dovetail_train_megatron.network import Network


_IN_A_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_WORKED_OUT = "rotary_emb.inv_freq"
"""The last part of the name of a tensor in old checkpoints, which is ignored since models compute it themselves."""


Receiving = int | Literal["all"]
"""The receiver of whole tensors: a rank, or all ranks."""


@torch.no_grad()
def read_weights(
    network: Network,
    table: TensorTable,
    section: ModelSection,
    put: Callable[[nn.Parameter, Tensor], None],
) -> bool:
    """Load this rank's shards of a checkpoint into every parameter.

    Args:
        network: a network whose parameters need not be initialised.
        table: the table of the network.
        section: the section with the checkpoint's path.
        put: a function called with each parameter and its new value, in the checkpoint's dtype.

    Returns:
        Whether the checkpoint has the critic's value head; if not, the head is set to 0. True for a language model.

    Raises:
        ModelError: a tensor is missing, differs in shape from the config, or does not exist in the network.
    """
    parallel = network.parallel
    head: dict[str, Tensor] = {}
    with StoredCheckpoint(section) as checkpoint:
        if not checkpoint.names:
            raise ModelError(
                f"model {section.path!r} has no weights (model.safetensors)",
                hint="the download may be incomplete: fetch the model again",
            )
        refuse_unplaced(checkpoint.names, network, table, section)
        if network.head == "value":
            hidden_size = network.architecture.hf.hidden_size
            head = stored_value_head(checkpoint, section, hidden_size)
        for entry in table.entries:
            parameter = table.parameters.get(entry.name)
            if parameter is None:
                continue
            if entry.name.startswith(VALUE_HEAD):
                kind = entry.name.removeprefix(VALUE_HEAD)
                put(parameter, head.get(kind, torch.zeros(parameter.shape)))
                continue
            names = [_stored_name(name, checkpoint, section) for name in table.hf_names(entry)]
            tensors = [checkpoint.tensor(name) for name in names]
            refuse_misshapen(dict(zip(names, tensors, strict=True)), table, entry, section)
            put(parameter, table.from_hf(entry, tensors, parallel.tp, parallel.tp_rank))
    copy = _tied_copy(network)
    if copy is not None:
        with StoredCheckpoint(section) as checkpoint:
            name = _stored_name("model.embed_tokens.weight", checkpoint, section)
            entry = next(e for e in table.entries if e.name == "embedding.word_embeddings.weight")
            whole = checkpoint.tensor(name)
            put(copy, table.from_hf(entry, [whole], parallel.tp, parallel.tp_rank))
    return network.head == "lm" or bool(head)


def _tied_copy(network: Network) -> nn.Parameter | None:
    """Return the last stage's copy of a tied embedding; None on other stages, or with a single stage."""
    parallel = network.parallel
    if network.tied and parallel.last_stage and not parallel.first_stage:
        return network.module.output_layer.weight
    return None


def tied_copy(network: Network, table: TensorTable) -> tuple[Entry, nn.Parameter] | None:
    """Return the embedding's entry and the last stage's copy of the embedding; None if this rank has no copy."""
    copy = _tied_copy(network)
    if copy is None:
        return None
    return next(e for e in table.entries if e.name == "embedding.word_embeddings.weight"), copy


def manifest_of(network: Network, table: TensorTable, version: int) -> WeightManifest:
    """Return the manifest of a weight update with this version: names, shapes and dtypes of the tensors that `outgoing` yields, in order.

    Needs no communication.
    """
    dtype = str(network.architecture.dtype).removeprefix("torch.")
    alone = _adapter_alone(network)
    tensors = []
    for entry in table.adapter if alone else table.entries:
        parts = [torch.empty(entry.shape, device="meta")] * len(entry.holders)
        tensors += [
            TensorSpec(name=_sent_name(name, entry), shape=tuple(tensor.shape), dtype=dtype)
            for name, tensor in table.to_hf(entry, parts)
        ]
    return WeightManifest(
        version=version,
        kind="adapter" if alone else "full",
        tensors=tuple(tensors),
        adapter=alone.described() if alone else None,
    )


def outgoing(
    network: Network, table: TensorTable, rank: int, to: Receiving = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a weight update, each gathered on request. Collective, one tensor after another.

    These are all weights, merged with the adapter if there is one; or the adapter alone if `lora.sync` is `adapter`.

    Args:
        network: the network of this rank.
        table: the table of the network.
        rank: this rank.
        to: the receiving rank, or all ranks.

    Yields:
        The tensors on the receiving ranks, in the compute dtype on their device; on other ranks, zeros of the same shapes.
    """
    if not _adapter_alone(network):
        yield from whole_weights(network, table, rank, to)
        return
    dtype = network.architecture.dtype
    for entry in table.adapter:
        for name, tensor in gathered(
            network, table, [entry], rank, lambda _, parameter: parameter.detach().to(dtype), to=to
        ):
            yield _sent_name(name, entry), tensor


def whole_weights(
    network: Network, table: TensorTable, rank: int, to: Receiving = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights in Hugging Face's shapes, merged with the adapter if there is one; collective, as `outgoing`."""
    adapter = network.adapter

    def computed_with(_: Entry, parameter: nn.Parameter) -> Tensor:
        return parameter.detach() if adapter is None else adapter.merged(parameter)

    yield from gathered(network, table, table.entries, rank, computed_with, to=to)


@torch.no_grad()
def gathered(
    network: Network,
    table: TensorTable,
    entries: Sequence[Entry],
    rank: int,
    values: Callable[[Entry, nn.Parameter], Tensor],
    *,
    to: Receiving | None = 0,
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with Hugging Face's names and shapes, each gathered on request. Collective, one tensor after another.

    Args:
        network: the network of this rank.
        table: the table of the network.
        entries: the entries to gather, the same on all ranks.
        rank: this rank.
        values: a function that returns a parameter's values, in the dtype of the update; may be collective over the parameter's copies.
        to: the receiving rank, or all ranks; None: each tensor is received only by the first rank that holds a shard of it.

    Yields:
        The tensors on the receiving ranks, on their device. With `to`, other ranks yield zeros of the same shapes.
    """
    for entry in entries:
        parameter = table.parameters.get(entry.name)
        part = None if parameter is None else values(entry, parameter)
        parts = _gathered(entry, part, rank)
        if to is not None:
            parts = _passed(entry, parts, rank, to, network)
        if parts is not None:
            yield from table.to_hf(entry, parts)
        elif to is not None:
            empty = [torch.empty(entry.shape, device="meta")] * len(entry.holders)
            for name, tensor in table.to_hf(entry, empty):
                yield name, torch.zeros((), dtype=_dtype(entry, network)).expand(tensor.shape)


def _adapter_alone(network: Network) -> MegatronAdapter | None:
    """Return the adapter if only the adapter's tensors are sent; else None."""
    adapter = network.adapter
    return adapter if adapter is not None and adapter.section.sync == "adapter" else None


def _sent_name(name: str, entry: Entry) -> str:
    return wire_name(name) if entry.adapted else name


def _passed(
    entry: Entry, parts: list[Tensor] | None, rank: int, to: Receiving, network: Network
) -> list[Tensor] | None:
    """Send an entry's shards from the rank that gathered them to the receiver, and return them on receiving ranks; None on other ranks.

    Args:
        entry: the entry.
        parts: the shards on the rank that gathered them, `entry.holders[0]`; None on other ranks.
        rank: this rank.
        to: the receiving rank, or all ranks.
        network: the network of this rank.
    """
    first = entry.holders[0]
    if rank == to and parts is not None:
        return parts
    if rank == to or (to == "all" and parts is None):
        parts = [
            torch.empty(entry.shape, dtype=_dtype(entry, network), device=network.device)
            for _ in entry.holders
        ]
    for tensor in parts or ():
        if to == "all":
            dist.broadcast(tensor, first)
        elif rank == to:
            dist.recv(tensor, first)
        else:
            dist.send(tensor, to)
    return parts if to in (rank, "all") else None


def _dtype(entry: Entry, network: Network) -> torch.dtype:
    """Return the dtype in which a tensor is sent."""
    return torch.float32 if entry.name.startswith(VALUE_HEAD) else network.architecture.dtype


def _gathered(entry: Entry, part: Tensor | None, rank: int) -> list[Tensor] | None:
    """Gather an entry's shards on the first rank that holds one, and return them there; None on other ranks.

    Args:
        entry: the entry.
        part: this rank's shard; None if the rank holds none.
        rank: this rank.
    """
    if rank not in entry.holders or part is None:
        return None
    first = entry.holders[0]
    if rank != first:
        dist.send(part.contiguous(), first)
        return None
    parts = [part.contiguous()]
    for holder in entry.holders[1:]:
        room = torch.empty_like(parts[0])
        dist.recv(room, holder)
        parts.append(room)
    return parts


def _stored_name(name: str, checkpoint: StoredCheckpoint, section: ModelSection) -> str:
    """Return a tensor's name in the checkpoint: models without a head store layers without the prefix `model.`."""
    for candidate in (name, name.removeprefix("model.")):
        if candidate in checkpoint.names:
            return candidate
    raise ModelError(
        f"model {section.path!r} lacks weights, such as {name!r}",
        hint="use a complete causal language model: fetch or export the model again",
    )


def refuse_unplaced(
    names: Collection[str], network: Network, table: TensorTable, section: ModelSection
) -> None:
    """Check that the network has every tensor of the checkpoint's layers.

    Args:
        names: the names of the checkpoint's tensors.
        network: the network.
        table: the table of the network.
        section: the section with the checkpoint's path.

    Raises:
        ModelError: the network lacks a tensor, such as a bias or the scales of quantised weights.
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
            f"the engine megatron does not support {len(unplaced)} tensor(s) of model {section.path!r}, "
            f"such as {unplaced[0]!r}",
            hint="use the engine fsdp2; if the tensors are scales of quantised weights, use the model before its quantisation",
        )


def refuse_misshapen(
    tensors: Mapping[str, Tensor], table: TensorTable, entry: Entry, section: ModelSection
) -> None:
    """Check that the checkpoint's tensors of an entry have the shapes that follow from the model's config.

    Args:
        tensors: the whole tensors as stored, by the checkpoint's names, in the order of `TensorTable.hf_names`.
        table: the table with the entry.
        entry: the entry of the table, not a value head.
        section: the section with the checkpoint's path.

    Raises:
        ModelError: a tensor has another shape; the error names both shapes.
    """
    parts = [torch.empty(entry.shape, device="meta")] * len(entry.holders)
    shapes = {name: tuple(tensor.shape) for name, tensor in table.to_hf(entry, parts)}
    for (name, tensor), known in zip(tensors.items(), table.hf_names(entry), strict=True):
        found = tuple(tensor.shape)
        if found != shapes[known]:
            raise ModelError(
                f"the tensor {name!r} of model {section.path!r} has shape {found}; its config.json requires {shapes[known]}",
                hint="fetch or export the model again: its config.json and its weights do not match",
            )
