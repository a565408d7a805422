"""Saving, loading and exporting one model. Checkpoints are elastic: written by any number of ranks, read by any other.

    training.json            what they hold: steps taken, and each parameter's own count of them
    weights/*.safetensors    float32 weights, every rank's shards, through torch.distributed.checkpoint
    moments/*.safetensors    the optimizer's moments, likewise
    random-RANK.safetensors  each rank's random state

With an adapter only what is trained is kept: the frozen base is the model that the run starts from. Nothing is
unpickled. All ranks must see the directory.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dovetail.errors import CheckpointError
from dovetail.interfaces import Tokenizer
from dovetail.training import (
    MOMENTS,
    WEIGHTS,
    RandomState,
    Ranks,
    random_file,
    read_facts,
    stored_random_state,
    unwritable,
    write_facts,
)
from dovetail_train_fsdp2.loading import tensors_of
from dovetail_train_fsdp2.model import quietly
from dovetail_train_fsdp2.optim import ShardedOptimizer
from dovetail_train_fsdp2.shards import whole
from dovetail_train_fsdp2.value_model import ValueModel, export_value_model
from dovetail_train_fsdp2.weights import gathered

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
    _write(directory / WEIGHTS, _kept(runner), ranks)
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
        kept = _kept(runner)
        _check_fits(directory, WEIGHTS, kept)
        moments: dict[str, Tensor] = {}
        if optimizer is not None and (trained := facts["optimizer"]) is not None:
            optimizer.restore(int(trained["steps"]), trained["parameters"])
            moments = optimizer.moments()
        if moments:
            _check_fits(directory, MOMENTS, moments)
        stored_state = stored_random_state(directory, ranks.rank)
    _read(directory / WEIGHTS, kept, ranks)
    if moments:
        _read(directory / MOMENTS, moments, ranks)
    random.restore(stored_state)


def export(directory: Path, runner: ModelRunner, tokenizer: Tokenizer, ranks: Ranks) -> None:
    """Write config, safetensors in the compute dtype with adapters merged, and the tokenizer where there is one.

    Collective; rank 0 gathers the whole model in its host's memory and writes it.

    Raises:
        CheckpointError: it can't be written; on every rank.
    """
    cpu = torch.device("cpu")
    in_memory = tensors_of(runner.trunk, runner.adapter)
    narrow: dict[str, Tensor] = {}
    for name, tensor in gathered(in_memory, runner.adapter, runner.dtype, runner.device):
        if ranks.first:
            narrow[name] = tensor.to(cpu)
    model = runner.model
    head: dict[str, Tensor] = {}
    if isinstance(model, ValueModel):
        head = {
            name: whole(parameter, runner.device).to(cpu)
            for name, parameter in model.value_head.named_parameters()
        }
    with ranks.together():
        if ranks.first:
            try:
                with quietly():
                    _write_model(directory, runner, narrow, head, tokenizer)
            except OSError as error:
                raise CheckpointError(
                    f"the model can't be exported to {directory}: {error}",
                    hint="see that there is room on the disk",
                ) from error


def _write_model(
    directory: Path,
    runner: ModelRunner,
    narrow: dict[str, Tensor],
    head: dict[str, Tensor],
    tokenizer: Tokenizer,
) -> None:
    if isinstance(runner.model, ValueModel):
        export_value_model(directory, runner.model, narrow, head)
    else:
        runner.trunk.save_pretrained(str(directory), state_dict=narrow)
    config = directory / "config.json"
    # transformers writes the dtype of the weights in memory, which are float32.
    described = json.loads(config.read_text()) | {"dtype": str(runner.dtype).removeprefix("torch.")}
    config.write_text(json.dumps(described, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(str(directory))


def _kept(runner: ModelRunner) -> dict[str, Tensor]:
    """Every tensor that a checkpoint keeps, once."""
    seen: set[int] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in runner.model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (runner.adapter is None or tensor.requires_grad):
            seen.add(id(tensor))
            kept[name] = tensor.detach()
    return kept


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


def _read(directory: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as read

    try:
        with _without_warnings():
            read(
                dict(tensors),
                storage_reader=HuggingFaceStorageReader(str(directory)),
                no_dist=ranks.size == 1,
            )
    except (OSError, SafetensorError, CheckpointException) as error:
        raise _unreadable(directory, error) from error


def _check_fits(directory: Path, part: str, expected: Mapping[str, Tensor]) -> None:
    """See that a part of the checkpoint holds these tensors, by reading the files' headers."""
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    try:
        found = HuggingFaceStorageReader(str(directory / part)).read_metadata()
    except (OSError, SafetensorError, ValueError) as error:
        raise _unreadable(directory / part, error) from error
    stored = {name: tuple(entry.size) for name, entry in found.state_dict_metadata.items()}  # type: ignore[union-attr]
    if not stored:
        raise CheckpointError(
            f"checkpoint {directory} has no {part}/*.safetensors", hint="it is incomplete"
        )
    wrong = sorted(expected.keys() ^ stored.keys()) or [
        name for name, tensor in expected.items() if tuple(tensor.shape) != stored[name]
    ]
    if wrong:
        raise CheckpointError(
            f"checkpoint {directory} is of another model: {wrong[0]!r} does not fit",
            hint="resume with the model, and the adapter, that the checkpoint was made with",
        )


def _unreadable(place: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"checkpoint {place} can't be read: {error}")


def _without_warnings() -> warnings.catch_warnings:
    """Without the warning that one process is one process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
