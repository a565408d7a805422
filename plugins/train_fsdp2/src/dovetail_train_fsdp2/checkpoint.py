"""Saving and loading one model. Any number of ranks can read a checkpoint that any other number of ranks wrote.

    training.json            number of optimizer steps, in total and for each parameter
    weights/*.safetensors    float32 weights, every rank's shards, as torch.distributed.checkpoint writes them
    moments/*.safetensors    the optimizer's moments, likewise
    random-RANK.safetensors  each rank's random state

With an adapter only trained tensors are saved: the frozen base is the model from which the run starts. No file is unpickled. All
ranks must see the directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dovetail_torch_engines import (
    MOMENTS,
    WEIGHTS,
    RandomState,
    Ranks,
    SafetensorsStore,
    emptied,
    random_file,
    read_facts,
    stored_random_state,
    unwritable,
    write_facts,
)
from dovetail_train_fsdp2.optim import ShardedOptimizer
from dovetail_train_fsdp2.shards import local, rows_here

if TYPE_CHECKING:
    from dovetail_train_fsdp2.forward import ModelRunner

FILE_BYTES = 2 * 2**30
"""The largest size of a file, in bytes; a larger shard of a tensor has a file of its own."""


def staged(
    directory: Path,
    runner: ModelRunner,
    optimizer: ShardedOptimizer | None,
    ranks: Ranks,
    random: RandomState,
    *,
    copy: bool,
) -> Callable[[], None]:
    """Create the directory, and return a function that writes weights, optimizer and random state there. Collective.

    The returned function is not collective. It raises a CheckpointError if a file of this rank can't be written.

    Args:
        directory: a directory that every rank can access.
        runner: the model.
        optimizer: the optimizer; None without training.
        ranks: the ranks, each of which writes its shards.
        random: the random state of this rank.
        copy: whether to copy the state to host memory first, so that training may continue before the function writes.

    Raises:
        CheckpointError: the directory can't be created; raised on every rank.
    """
    emptied(directory, ranks)
    moments = optimizer.moments() if optimizer is not None else {}
    parts = [
        (directory / part, list(_shards(tensors, ranks, copy=copy)))
        for part, tensors in ((WEIGHTS, kept_tensors(runner)), (MOMENTS, moments))
    ]
    states = dict(random.tensors)
    trained = None
    if optimizer is not None:
        trained = {"steps": optimizer.steps, "parameters": optimizer.parameter_steps()}

    def write() -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file(states, directory / random_file(ranks.rank))
            for folder, shards in parts:
                _write(folder, shards, ranks)
        except (OSError, SafetensorError) as error:
            raise unwritable(directory, error) from error
        if ranks.first:
            write_facts(directory, ranks=ranks.size, optimizer=trained)

    return write


def load(
    directory: Path,
    runner: ModelRunner,
    optimizer: ShardedOptimizer | None,
    ranks: Ranks,
    random: RandomState,
) -> None:
    """Restore the state that `staged` wrote, on the current ranks. Collective.

    Args:
        directory: a directory that every rank can access.
        runner: the model, filled in place.
        optimizer: the optimizer, filled in place if the checkpoint has an optimizer's state; None without training.
        ranks: the current ranks; their number may differ from that of the checkpoint.
        random: the random state, restored if the checkpoint has one for this rank.

    Raises:
        CheckpointError: a file is missing or unreadable, or of another model; raised on every rank.
    """
    with ranks.together():
        facts = read_facts(directory)
        kept = kept_tensors(runner)
        weights = _stored(directory / WEIGHTS, kept)
        stored_state = stored_random_state(directory, ranks.rank)
    moments: dict[str, Tensor] = {}
    if optimizer is not None and (trained := facts["optimizer"]) is not None:
        # Collective for optimizers that gather parameters in a step.
        optimizer.restore(int(trained["steps"]), trained["parameters"])
        moments = optimizer.moments()
    if moments:
        with ranks.together():
            stored_moments = _stored(directory / MOMENTS, moments)
        stored_moments.fill(moments, alone=ranks.size == 1)
    weights.fill(kept, alone=ranks.size == 1)
    random.restore(stored_state)


def average(directory: Path, runner: ModelRunner, ranks: Ranks, share: float) -> None:
    """Move the weights towards the saved weights: w ← (1 − share) · w + share · w_saved. Collective.

    Args:
        directory: a directory that every rank can access.
        runner: the model, changed in place, one tensor after another.
        ranks: the current ranks; their number may differ from that of the checkpoint.
        share: the weight of the saved tensors, in (0, 1].

    Raises:
        CheckpointError: a file is missing or unreadable, or of another model; raised on every rank.
    """
    with ranks.together():
        kept = kept_tensors(runner)
        weights = _stored(directory / WEIGHTS, kept)
    if share == 1:
        weights.fill(kept, alone=ranks.size == 1)
        return
    for name, tensor in kept.items():
        written = torch.empty_like(tensor)
        weights.fill({name: written}, alone=ranks.size == 1)
        if tensor.is_floating_point():
            local(tensor).lerp_(local(written), share)
        else:
            local(tensor).copy_(local(written))


def kept_tensors(runner: ModelRunner) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint saves, by name, each once: all of the model's, or with an adapter the trained ones.

    They have any shape […] and share the memory of the model; sharded tensors are DTensors.
    """
    seen: set[int] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in runner.model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (runner.adapter is None or tensor.requires_grad):
            seen.add(id(tensor))
            kept[name] = tensor.detach()
    return kept


def _stored(folder: Path, expected: Mapping[str, Tensor]) -> SafetensorsStore:
    """Open a checkpoint's folder of weights or of moments, and check that it has exactly the expected tensors."""
    store = SafetensorsStore(folder)
    store.check({name: tensor.shape for name, tensor in expected.items()})
    return store


def _shards(
    tensors: Mapping[str, Tensor], ranks: Ranks, *, copy: bool
) -> Iterator[tuple[str, Tensor, int]]:
    """Yield the shards that this rank must write: tensor's name, shard [rows here, …] on the CPU, and index of the shard's first row.

    Of several copies of a shard, only one rank writes its own; rank 0 writes tensors that are not sharded. `copy` copies shards that are
    on the CPU already, too.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            place = tuple(tensor.device_mesh.get_coordinate() or ())
            copies = [
                at for at, p in zip(place, tensor.placements, strict=True) if p.is_replicate()
            ]
            first, last = rows_here(tensor)
            mine = not any(copies) and last > first
        else:
            first, mine = 0, ranks.first
        if mine:
            yield name, local(tensor).to("cpu", copy=copy).contiguous(), first


def _write(folder: Path, shards: Sequence[tuple[str, Tensor, int]], ranks: Ranks) -> None:
    """Write a rank's shards in the format of torch.distributed.checkpoint's HuggingFaceStorageWriter.

    That writer is not called, since it runs collectives, which could overlap with training's.
    """
    from safetensors.torch import save_file

    files: list[list[tuple[str, Tensor, int]]] = []
    size = FILE_BYTES
    for shard in shards:
        size += shard[1].nbytes
        if size > FILE_BYTES:
            files.append([])
            size = shard[1].nbytes
        files[-1].append(shard)
    for number, file in enumerate(files, start=1):
        folder.mkdir(exist_ok=True)
        offsets = {
            name: {"saved_offsets": [first, *[0] * (shard.dim() - 1)][: shard.dim()]}
            for name, shard, first in file
        }
        save_file(
            {name: shard for name, shard, _ in file},
            folder / f"shard-{ranks.rank + 1:05}-model-{number:05}-of-{len(files):05}.safetensors",
            metadata={
                "DCP_SHARDING_INFO": json.dumps(offsets),
                "DCP_VERSION": "1.0",
                "format": "pt",
            },
        )
