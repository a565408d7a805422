"""Saving and loading one model's training state, in the format that the engine `fsdp2` also writes and reads.

    training.json            number of optimizer steps, in total and for each parameter
    weights/*.safetensors    float32 weights under Hugging Face's names, each from the rank with its first shard
    moments/*.safetensors    the optimizer's moments, likewise, as `KIND.NAME`: the kind of moment, such as `exp_avg`, and the weight's name
    random-RANK.safetensors  each rank's random state

With an adapter only trained tensors are saved: the frozen base is the model from which the run starts. The files don't depend on
the parallel layout, so that any other layout can read them. No file is unpickled. All ranks must see the directory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.errors import CheckpointError
from dovetail_torch_engines import (
    MOMENTS,
    WEIGHTS,
    LoraSection,
    RandomState,
    Ranks,
    SafetensorsStore,
    SafetensorsWriter,
    adapter_tensors,
    emptied,
    random_file,
    read_facts,
    stored_random_state,
    unwritable,
    wire_name,
    write_facts,
)
from dovetail_train_megatron.names import VALUE_HEAD, Entry, TensorTable
from dovetail_train_megatron.network import Network
from dovetail_train_megatron.optim import MegatronOptimizer
from dovetail_train_megatron.weights import gathered, tied_copy


def staged(
    directory: Path,
    network: Network,
    table: TensorTable,
    optimizer: MegatronOptimizer | None,
    ranks: Ranks,
    random: RandomState,
    *,
    copy: bool,
) -> Callable[[], None]:
    """Create the directory, and return a function that writes weights, optimizer and random state there. Collective.

    The returned function is not collective. It raises a CheckpointError if a file of this rank can't be written.

    Args:
        directory: a directory that every rank can access.
        network: the network with the weights.
        table: the table of the network's tensors.
        optimizer: the optimizer; None without training.
        ranks: the ranks, each of which writes some tensors.
        random: the random state of this rank.
        copy: whether to copy all tensors to host memory, so that training may continue before the function writes. If False, this call
            already writes each file that reaches the size limit.

    Raises:
        CheckpointError: the directory can't be created; raised on every rank.
    """
    emptied(directory, ranks)
    writers = []
    kinds = ("weight", *(optimizer.kinds if optimizer is not None and optimizer.steps else ()))
    for kind in kinds:
        folder = directory / (WEIGHTS if kind == "weight" else MOMENTS)
        prefix = "" if kind == "weight" else f"{kind}."
        stem = f"{prefix}{ranks.rank:05}"
        sizes = (sys.maxsize,) if copy else ()
        writer = SafetensorsWriter(folder, stem, *sizes)
        # Every tensor is gathered even if writing fails: the other ranks take part in the collectives.
        for name, tensor in _gathered(network, table, optimizer, kind, ranks):
            writer.add(prefix + kept_name(name, network), tensor)
        writers.append(writer)
    states = dict(random.tensors)
    trained = _counts(network, table, optimizer)

    def write() -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file(states, directory / random_file(ranks.rank))
        except (OSError, SafetensorError) as error:
            raise unwritable(directory, error) from error
        for writer in writers:
            writer.finish()
        if ranks.first:
            write_facts(directory, ranks=ranks.size, optimizer=trained)

    return write


def _counts(
    network: Network, table: TensorTable, optimizer: MegatronOptimizer | None
) -> dict[str, Any] | None:
    """Return the numbers of steps, in total and for each parameter, for `training.json`; None without an optimizer."""
    if optimizer is None:
        return None
    names = [kept_name(n, network) for e in table.kept for n in table.hf_names(e)]
    steps = optimizer.steps
    counted = names if steps and optimizer.kinds else ()
    return {"steps": steps, "parameters": dict.fromkeys(counted, float(steps))}


@torch.no_grad()
def load(
    directory: Path,
    network: Network,
    table: TensorTable,
    optimizer: MegatronOptimizer | None,
    ranks: Ranks,
    random: RandomState,
) -> None:
    """Restore a training state that `staged` wrote in any layout, or that the engine `fsdp2` wrote. Collective.

    Raises:
        CheckpointError: a file is missing or unreadable, or belongs to another model; raised on every rank.
    """
    with ranks.together():
        facts = read_facts(directory)
        store = SafetensorsStore(directory / WEIGHTS)
        store.check(_expected(network, table))
        moments: SafetensorsStore | None = None
        trained = facts["optimizer"]
        if (
            optimizer is not None
            and trained is not None
            and trained["parameters"]
            and not optimizer.kinds
        ):
            raise CheckpointError(
                f"checkpoint {directory} has an optimizer's moments, but optim.name=sgd of this run keeps none",
                hint="resume with the optimizer of the run that wrote the checkpoint, or start anew from an exported model",
            )
        if optimizer is not None and trained is not None and trained["steps"] and optimizer.kinds:
            if not trained["parameters"]:
                raise CheckpointError(
                    f"checkpoint {directory} has no optimizer's moments (it was written with sgd), but this run's optimizer needs them",
                    hint="resume with optim.name=sgd, or start anew from an exported model",
                )
            moments = SafetensorsStore(directory / MOMENTS)
            moments.check(_expected(network, table, optimizer.kinds))
        stored_state = stored_random_state(directory, ranks.rank)
        # From here on the current state is overwritten; all checks are above.
        if optimizer is not None and trained is not None:
            optimizer.restore(int(trained["steps"]))
        for entry, parameter in _own(network, table):
            names = [kept_name(name, network) for name in table.hf_names(entry)]
            part = _part(table, network, entry, store.read(names))
            parameter.copy_(part)
            if optimizer is None:
                continue
            optimizer.fill(parameter, "weight", part)
            if moments is None:
                continue
            for kind in optimizer.kinds:
                found = moments.read([f"{kind}.{name}" for name in names])
                optimizer.fill(parameter, kind, _part(table, network, entry, found))
    random.restore(stored_state)


@torch.no_grad()
def start_adapter(network: Network, table: TensorTable, section: LoraSection) -> None:
    """Load this rank's shards of the adapter at `section.adapter_path`.

    Raises:
        ConfigError: the adapter does not match the section, or belongs to another model.
        CheckpointError: the adapter's files can't be read.
    """
    expected = _expected(network, table).items()
    stored = adapter_tensors(
        section, {wire_name(name): shape for name, shape in expected if ".lora_" in name}
    )
    for entry, parameter in _own(network, table):
        names = [wire_name(kept_name(name, network)) for name in table.hf_names(entry)]
        if names[0] in stored:
            parameter.copy_(_part(table, network, entry, [stored[name] for name in names]))


def kept_name(name: str, network: Network) -> str:
    """Return the name of a tensor in checkpoints. A critic's tensors, except the value head's, have the prefix `trunk` there."""
    if network.head == "lm" or name.startswith(VALUE_HEAD):
        return name
    return f"trunk.{name.removeprefix('model.')}"


def _gathered(
    network: Network,
    table: TensorTable,
    optimizer: MegatronOptimizer | None,
    kind: str,
    ranks: Ranks,
) -> Iterator[tuple[str, Tensor]]:
    def values(entry: Entry, parameter: nn.Parameter) -> Tensor:
        if optimizer is None:
            return parameter.detach().float()
        return optimizer.whole(parameter, kind, expert=entry.expert)

    return gathered(network, table, table.kept, ranks.rank, values, to=None)


def _own(network: Network, table: TensorTable) -> Iterator[tuple[Entry, nn.Parameter]]:
    for entry in table.kept:
        if entry.name in table.parameters:
            yield entry, table.parameters[entry.name]
    if not table.adapter and (copy := tied_copy(network, table)) is not None:
        yield copy


def _part(table: TensorTable, network: Network, entry: Entry, tensors: list[Tensor]) -> Tensor:
    return table.from_hf(entry, tensors, network.parallel.tp, network.parallel.tp_rank)


def _expected(
    network: Network, table: TensorTable, kinds: tuple[str, ...] = ("",)
) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors that the checkpoint's folder `weights` or `moments` must have.

    Args:
        network: the network.
        table: the table of the network's tensors.
        kinds: the kinds of moments, such as `exp_avg`, which prefix the names; by default the names of weights are returned.
    """
    shapes = {}
    for entry in table.kept:
        parts = [torch.empty(entry.shape, device="meta")] * len(entry.holders)
        for name, tensor in table.to_hf(entry, parts):
            for kind in kinds:
                prefix = f"{kind}." if kind else ""
                shapes[prefix + kept_name(name, network)] = tuple(tensor.shape)
    return shapes
