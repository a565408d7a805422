"""TensorTable: which ranks hold the shards of each tensor, and its names in Megatron and Hugging Face.

Every rank has the whole table. It is built once from all ranks' descriptions of their parameters.
"""

from __future__ import annotations

import re
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dovetail_train_megatron.network import Network

LAYER = re.compile(r"^(?:decoder|model)\.layers\.(\d+)\.(.+)$")
EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
GROUPED = re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
VALUE_HEAD = "value_head."


_Told = tuple[str, tuple[int, ...], int | None, bool]
"""A rank's description of a parameter: name, shape of the shard, divided dimension, and whether it is an adapter's."""


@attrs.frozen(kw_only=True)
class Entry:
    """One tensor of Megatron, with the ranks that hold its shards."""

    name: str
    """Name of the tensor in mbridge, with layer and expert indices counted over the whole model."""
    holders: tuple[int, ...]
    """The ranks that hold the shards of one copy of the tensor, in the order of the shards; a single rank if the tensor is not divided.
    If several groups of ranks have a copy, such as data-parallel ranks, those of the first group."""
    shape: tuple[int, ...]
    """Shape of one shard of the tensor."""
    dim: int | None
    """The dimension that is divided; None if the tensor is not divided."""
    adapted: bool = False
    """Whether the tensor belongs to an adapter. Adapters have the same names and shapes in Megatron and in peft."""

    @property
    def expert(self) -> bool:
        """Whether the tensor belongs to an expert, so that only some of the expert-parallel ranks hold it."""
        return ".mlp.experts." in self.name


class TensorTable:
    """The table of one model's tensors.

    Attributes:
        entries: the entries of the model without its adapter, each once, in the order of the model's layers.
        adapter: the entries of the adapter, each once; empty without an adapter.
        parameters: this rank's parameters, by entry name.
    """

    def __init__(self, network: Network, rank: int) -> None:
        """Build the table of the model of which `network` is this rank's shard. Collective over all ranks of the default process group."""
        self._bridge = network.architecture.bridge
        self.parameters: dict[str, nn.Parameter] = {}
        adapted = {} if network.adapter is None else network.adapter.tensors()
        of_adapter = {id(parameter): name for name, parameter in adapted.items()}
        mine: list[_Told] = []
        for local, parameter in network.module.named_parameters():
            own = of_adapter.get(id(parameter))
            name = _whole_name(local, network) if own is None else own
            if name == "output_layer.weight" and network.tied:
                # This is the last stage's copy of the tied embedding; Megatron adds up the gradients of both.
                continue
            self.parameters[name] = parameter
            mine.append((name, tuple(parameter.shape), _divided(parameter), own is not None))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (rank, network.parallel.tp_rank, mine))
        found = _entries(everyone, network.parallel.tp)
        self.entries = [entry for entry in found if not entry.adapted]
        self.adapter = [entry for entry in found if entry.adapted]

    @property
    def kept(self) -> list[Entry]:
        """The entries that a training state holds: all entries, or with an adapter only those of the adapter and a value head."""
        if not self.adapter:
            return self.entries
        return self.adapter + [e for e in self.entries if e.name.startswith(VALUE_HEAD)]

    def hf_names(self, entry: Entry) -> list[str]:
        """Return the names of the Hugging Face tensors that an entry, a tensor of Megatron, consists of."""
        if entry.adapted or entry.name.startswith(VALUE_HEAD):
            return [entry.name]
        return self._bridge._weight_name_mapping_mcore_to_hf(entry.name)  # noqa: SLF001

    def to_hf(self, entry: Entry, parts: list[Tensor]) -> list[tuple[str, Tensor]]:
        """Combine the shards of all tensor-parallel ranks, and split the whole tensor into Hugging Face's tensors and shapes."""
        if entry.name.startswith(VALUE_HEAD):
            return [(entry.name, parts[0])]
        if entry.adapted:
            return [(entry.name, parts[0] if entry.dim is None else torch.cat(parts, entry.dim))]
        whole = parts[0]
        if len(parts) > 1:
            described = torch.empty(entry.shape, device="meta")
            described.tensor_model_parallel = True  # type: ignore[attr-defined]
            described.partition_dim = entry.dim  # type: ignore[attr-defined]
            whole = self._bridge._weight_merge_across_tp(entry.name, parts, described)  # noqa: SLF001
        names, tensors = self._bridge._weight_to_hf_format(entry.name, whole)  # noqa: SLF001
        return list(zip(names, (tensor.contiguous() for tensor in tensors), strict=True))

    def from_hf(self, entry: Entry, tensors: list[Tensor], tp: int, tp_rank: int) -> Tensor:
        """Return the shard of an entry that rank `tp_rank` of `tp` tensor-parallel ranks holds, in the parameter's shape.

        Args:
            entry: the entry.
            tensors: the undivided Hugging Face tensors of the entry, in the order of `hf_names`.
            tp: the number of tensor-parallel ranks.
            tp_rank: the rank among them.
        """
        if entry.name.startswith(VALUE_HEAD):
            return tensors[0]
        if entry.adapted:
            return tensors[0] if entry.dim is None else tensors[0].chunk(tp, entry.dim)[tp_rank]
        whole: Tensor = self._bridge._weight_to_mcore_format(entry.name, tensors)  # noqa: SLF001
        if entry.dim is None:
            return whole
        described = torch.empty(entry.shape, device="meta")
        parts = self._bridge._weight_split_across_tp(entry.name, whole, described, tp)  # noqa: SLF001
        return parts[tp_rank]


def _entries(everyone: list[Any], tp: int) -> list[Entry]:
    found: dict[str, Entry] = {}
    for rank, tp_rank, tensors in everyone:
        if tp_rank:  # the other ranks, of any dp, pp or cp, may have other experts
            continue
        for name, shape, dim, adapted in tensors:
            if name not in found:
                # Ranks of a tensor-parallel group are neighbours.
                holders = (rank,) if dim is None else tuple(range(rank, rank + tp))
                found[name] = Entry(
                    name=name, holders=holders, shape=shape, dim=dim, adapted=adapted
                )
    return sorted(found.values(), key=_place)


def _place(entry: Entry) -> tuple[Any, ...]:
    """Return an entry's sort key: the embedding first, then layers by index, then the rest. The tensors of a layer are sorted by name, with
    the digits in names compared as numbers.
    """
    layer = LAYER.match(entry.name)
    if layer is None:
        return (0 if entry.name.startswith("embedding") else 2, 0, [entry.name])
    parts = re.split(r"(\d+)", layer.group(2))
    return (1, int(layer.group(1)), [f"{int(p):08}" if p.isdigit() else p for p in parts])


def _divided(parameter: nn.Parameter) -> int | None:
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return int(parameter.partition_dim)  # type: ignore[attr-defined]


def _whole_name(local: str, network: Network) -> str:
    """Return mbridge's name of a parameter: as in Transformer Engine's layers, with indices counted over the whole model.

    Args:
        local: the parameter's name in this rank's module, where layers and experts are counted from 0.
        network: the network with the parameter.
    """
    layer = LAYER.match(local)
    if layer is None:
        return local
    number = int(network.module.decoder.layers[int(layer.group(1))].layer_number) - 1
    rest = layer.group(2)
    own = _experts_here(network)
    if (expert := EXPERT.match(rest)) is not None:
        rest = f"mlp.experts.{expert.group(2)}.weight{own + int(expert.group(1))}"
    elif (grouped := GROUPED.match(rest)) is not None:
        rest = f"mlp.experts.{grouped.group(1)}.weight{own + int(grouped.group(2))}"
    elif rest == "input_layernorm.weight":
        rest = "self_attention.linear_qkv.layer_norm_weight"
    elif (
        rest == "pre_mlp_layernorm.weight"
        and network.architecture.transformer.num_moe_experts is None
    ):
        rest = "mlp.linear_fc1.layer_norm_weight"
    return f"decoder.layers.{number}.{rest}"


def _experts_here(network: Network) -> int:
    """Return the index, among all experts of a layer, of the first expert that this rank holds."""
    experts = int(network.architecture.transformer.num_moe_experts or 0)
    return experts // network.parallel.ep * network.parallel.ep_rank
