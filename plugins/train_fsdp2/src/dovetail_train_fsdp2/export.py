"""A model in Hugging Face format, written file by file: from an engine's weights, or from a saved training state without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dovetail.errors import CheckpointError
from dovetail.interfaces import PluginContext, Tokenizer
from dovetail.sections import ModelSection
from dovetail_torch_engines import (
    WEIGHTS,
    Ranks,
    SafetensorsStore,
    SafetensorsWriter,
    StoredCheckpoint,
)
from dovetail_train_fsdp2.checkpoint import kept_tensors
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.loading import stored_places, tensors_of
from dovetail_train_fsdp2.model import empty_model, quietly
from dovetail_train_fsdp2.quantised import dequantised, quantisable, quantised
from dovetail_train_fsdp2.shards import whole
from dovetail_train_fsdp2.start import empty_runner
from dovetail_train_fsdp2.value_model import ValueModel, classifier
from dovetail_train_fsdp2.weights import empty, merged, stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dovetail_train_fsdp2.forward import ModelRunner


def export(directory: Path, runner: ModelRunner, tokenizer: Tokenizer, ranks: Ranks) -> None:
    """Write a Hugging Face model: config, safetensors in the compute dtype with adapters merged, and the tokenizer if there is one.

    Collective; tensors are gathered one after another, and rank 0 keeps one file's tensors in memory.

    Raises:
        CheckpointError: the files can't be written; raised on every rank.
    """
    _export(directory, runner, tokenizer, ranks, lambda _, tensor: whole(tensor, runner.device))


def export_saved(
    saved: Path,
    directory: Path,
    config: Fsdp2Config,
    context: PluginContext,
    section: ModelSection,
) -> bool:
    """Write the model of a saved training state as `export` would, in this process, with one file's tensors in memory.

    Args:
        saved: the directory of a training state in the format of `dovetail_torch_engines.state`, written by any number of ranks.
        directory: the directory to write the model to.
        config: the config of the engine.
        context: the plugin's context, with the head and the tokenizer.
        section: the config section of the model from which training started.

    Returns:
        Whether the model was written: False if the architecture's tensors have other names or shapes in memory than in its files.

    Raises:
        CheckpointError: the state is damaged or of another model, or the directory can't be written.
    """
    model = empty_model(section)
    with StoredCheckpoint(section) as base:
        places = stored_places(model, model, base)
        if places is None:
            return False
        runner = empty_runner(model, config, context, getattr(torch, section.dtype))
        state = SafetensorsStore(saved / WEIGHTS)
        kept = kept_tensors(runner)
        state.check({name: tensor.shape for name, tensor in kept.items()})
        _fill_small(runner, state)
        below = f"{model.base_model_prefix}."
        prefix = "trunk." if isinstance(runner.model, ValueModel) else ""

        rounded: set[str | None] = set()
        if runner.adapter is not None and runner.adapter.section.base is not None:
            named = quantisable(runner.trunk, runner.output_layer)
            rounded = {runner.adapter.base_name(f"{layer}.weight") for layer, _ in named}

        def read(name: str, tensor: Tensor) -> Tensor:
            if runner.adapter is not None:
                found = base.tensor(places[name if name in places else f"{below}{name}"])
                if name not in rounded:
                    return found
                return dequantised(quantised(found.to(runner.dtype)))
            room = torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
            state.fill({f"{prefix}{name}": room})
            return room

        _export(directory, runner, context.tokenizer, Ranks(None, 0), read)
    return True


def _fill_small(runner: ModelRunner, state: SafetensorsStore) -> None:
    """Allocate the adapter and the value head on the CPU, and fill them from the training state."""
    if runner.adapter is not None:
        runner.adapter.to_cpu()
    if isinstance(runner.model, ValueModel):
        runner.model.value_head.to_empty(device="cpu")
    runner.device = torch.device("cpu")
    small = {name: tensor for name, tensor in kept_tensors(runner).items() if not tensor.is_meta}
    if small:
        state.fill(small)


def _export(
    directory: Path,
    runner: ModelRunner,
    tokenizer: Tokenizer,
    ranks: Ranks,
    read: Callable[[str, Tensor], Tensor],
) -> None:
    """Write the model. `read` returns a tensor of the base as a whole, given its name and its tensor in memory."""
    model, prefix, head = runner.trunk, "", ""
    if isinstance(runner.model, ValueModel):
        model, prefix, head = classifier(runner.model)
    in_memory = {
        f"{prefix}{name}": tensor
        for name, tensor in tensors_of(runner.trunk, runner.adapter).items()
    }
    tensors = (
        (f"{prefix}{name}", tensor)
        for name, tensor in merged(runner.trunk, runner.adapter, runner.dtype, read)
    )
    left_out = set(model._keys_to_ignore_on_save or ())  # noqa: SLF001 - transformers' own
    writer = SafetensorsWriter(directory, "model")
    for name, tensor in stored(model, tensors, empty(in_memory, runner.dtype)):
        if ranks.first and name not in left_out:
            writer.add(name, tensor)
    if isinstance(runner.model, ValueModel):
        for name, parameter in runner.model.value_head.named_parameters():
            tensor = whole(parameter, runner.device)
            if ranks.first:
                writer.add(f"{head}.{name}", tensor)
    with ranks.together():
        if ranks.first:
            try:
                # `save_pretrained` removes shards that it did not write, so that it must run before the shards get their names.
                _describe(directory, model, runner.dtype, tokenizer)
                writer.finish_model()
            except OSError as error:
                raise CheckpointError(
                    f"the model can't be exported to {directory}: {error}",
                    hint="see that there is room on the disk",
                ) from error


def _describe(
    directory: Path, model: PreTrainedModel, dtype: torch.dtype, tokenizer: Tokenizer
) -> None:
    """Write config, generation config and tokenizer, as transformers does; `dtype` is that of the exported weights."""
    from transformers import GenerationConfig

    # Many models ship sampling parameters without `do_sample`, which transformers reads but refuses to save.
    described = copy(model)
    described.generation_config = GenerationConfig()
    with quietly():
        described.save_pretrained(str(directory), state_dict={})
    if model.can_generate():
        place = str(directory / "generation_config.json")
        model.generation_config.to_json_file(place, keys_to_pop=["compile_config"])
    config = directory / "config.json"
    # transformers writes the dtype of the weights in memory, which are float32.
    described = json.loads(config.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
    config.write_text(json.dumps(described, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(str(directory))
