"""Saving and loading one model. Checkpoints are elastic: written by any number of ranks, read by any other.

    training.json            what they hold: steps taken, and each parameter's own count of them
    weights/*.safetensors    float32 weights, every rank's shards, through torch.distributed.checkpoint
    moments/*.safetensors    the optimizer's moments, likewise
    random-RANK.safetensors  each rank's random state

With an adapter only what is trained is kept: the frozen base is the model that the run starts from. Nothing is
unpickled. All ranks must see the directory.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from dovetail.training import (
    MOMENTS,
    WEIGHTS,
    RandomState,
    Ranks,
    SafetensorsStore,
    random_file,
    read_facts,
    stored_random_state,
    unwritable,
    write_facts,
)
from dovetail_train_fsdp2.optim import ShardedOptimizer

if TYPE_CHECKING:
    from dovetail_train_fsdp2.forward import ModelRunner

FILE_BYTES = 2 * 2**30
"""Size of a file of one rank, at most, or that of one tensor's shard."""


def save(
    directory: Path,
    runner: ModelRunner,
    optimizer: ShardedOptimizer | None,
    ranks: Ranks,
    random: RandomState,
) -> None:
    """Write weights, optimizer and random state below the directory, which is made. Collective.

    Raises:
        CheckpointError: it can't be written; on every rank.
    """
    from safetensors.torch import save_file

    with ranks.together():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if ranks.first:
                # Shards of more ranks than there are now would be read as well.
                for part in (WEIGHTS, MOMENTS):
                    shutil.rmtree(directory / part, ignore_errors=True)
            save_file(random.tensors, directory / random_file(ranks.rank))
        except OSError as error:
            raise unwritable(directory, error) from error
    _write(directory / WEIGHTS, kept_tensors(runner), ranks)
    moments = optimizer.moments() if optimizer is not None else {}
    if moments:
        _write(directory / MOMENTS, moments, ranks)
    trained = None
    if optimizer is not None:
        trained = {"steps": optimizer.steps, "parameters": optimizer.parameter_steps()}
    with ranks.together():
        if ranks.first:
            write_facts(directory, ranks=ranks.size, optimizer=trained)


def load(
    directory: Path,
    runner: ModelRunner,
    optimizer: ShardedOptimizer | None,
    ranks: Ranks,
    random: RandomState,
) -> None:
    """Restore what `save` wrote, on as many ranks as there are now. Collective.

    Args:
        directory: seen by every rank.
        runner: filled in place.
        optimizer: filled in place; None where the checkpoint holds none.
        ranks: those of now; they need not be as many as those that wrote.
        random: restored where this rank's was kept.

    Raises:
        CheckpointError: a file is missing or unreadable, or of another model; on every rank.
    """
    with ranks.together():
        facts = read_facts(directory)
        kept = kept_tensors(runner)
        weights = _stored(directory / WEIGHTS, kept)
        moments: dict[str, Tensor] = {}
        if optimizer is not None and (trained := facts["optimizer"]) is not None:
            optimizer.restore(int(trained["steps"]), trained["parameters"])
            moments = optimizer.moments()
        if moments:
            stored_moments = _stored(directory / MOMENTS, moments)
        stored_state = stored_random_state(directory, ranks.rank)
    weights.fill(kept, alone=ranks.size == 1)
    if moments:
        stored_moments.fill(moments, alone=ranks.size == 1)
    random.restore(stored_state)


def kept_tensors(runner: ModelRunner) -> dict[str, Tensor]:
    """Every tensor that a checkpoint keeps, once."""
    seen: set[int] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in runner.model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (runner.adapter is None or tensor.requires_grad):
            seen.add(id(tensor))
            kept[name] = tensor.detach()
    return kept


def _stored(folder: Path, expected: Mapping[str, Tensor]) -> SafetensorsStore:
    """A part of the checkpoint, which holds these tensors."""
    store = SafetensorsStore(folder)
    store.check({name: tensor.shape for name, tensor in expected.items()})
    return store


def _write(directory: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as write

    try:
        with _without_warnings():
            write(
                dict(tensors),
                storage_writer=HuggingFaceStorageWriter(
                    str(directory),
                    fqn_to_index_mapping=_files_of(tensors, ranks.size),
                    save_distributed=True,
                ),
                no_dist=ranks.size == 1,
            )
    except (OSError, CheckpointException) as error:
        raise unwritable(directory, error) from error


def _files_of(tensors: Mapping[str, Tensor], ranks: int) -> dict[str, int]:
    """Which of a rank's files, from 1, holds each tensor: a file is put together in memory before it is written."""
    number, size = 1, 0
    files: dict[str, int] = {}
    for name, tensor in tensors.items():
        own = tensor.numel() * tensor.element_size() // ranks
        if size and size + own > FILE_BYTES:
            number, size = number + 1, 0
        size += own
        files[name] = number
    return files


def _without_warnings() -> warnings.catch_warnings:
    """Without the warning that one process is one process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
