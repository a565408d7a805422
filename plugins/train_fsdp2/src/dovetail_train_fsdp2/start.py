"""Building a ModelRunner from a plugin's context: model, head, adapter and shards, with checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from dovetail.errors import ConfigError, ModelError
from dovetail.interfaces import PluginContext
from dovetail.sections import ModelSection
from dovetail_torch_engines import Ranks, StoredCheckpoint
from dovetail_train_fsdp2.adapter import PeftAdapter, narrow_frozen
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.float8 import multiply_in_float8
from dovetail_train_fsdp2.forward import ModelRunner, PolicyRunner, ValueRunner
from dovetail_train_fsdp2.layers import prepare_layers, room_for_logits
from dovetail_train_fsdp2.loading import give_out, read_shards, stored_places, tensors_of
from dovetail_train_fsdp2.model import base_of, empty_model, load_model
from dovetail_train_fsdp2.quantised import Nf4Linear, make_room, quantisable
from dovetail_train_fsdp2.sharding import Sharding, blocks_of, join_alone
from dovetail_train_fsdp2.ulysses import sequence_parallel
from dovetail_train_fsdp2.value_model import (
    ValueModel,
    empty_value_model,
    fill_head,
    load_value_model,
)
from dovetail_train_fsdp2.vision import freeze_vision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def ranks_of(config: Fsdp2Config, context: PluginContext) -> Ranks:
    """Return the engine's ranks; on an accelerator, a single process creates a group of one rank.

    Raises:
        DispatchError: the process group is missing or differs from the mesh in size.
        ConfigError: the size of the mesh's axis `cp` is not `sequence_parallel_size`.
    """
    mesh, device = context.mesh, torch.device(context.device)
    if device.type != "cpu" and (mesh is None or mesh.size == 1):
        join_alone(device)
    together = 1 if mesh is None else mesh.axis_size("cp")
    if together != config.sequence_parallel_size:
        raise ConfigError(
            f"sequence_parallel_size is {config.sequence_parallel_size}, but the engine's mesh "
            f"({'one process' if mesh is None else mesh.described()}) has cp={together}",
            hint="make the mesh with the axes that the config's mesh_axes() names",
        )
    return Ranks(mesh, context.rank)


def load_runner(
    config: Fsdp2Config, context: PluginContext, ranks: Ranks
) -> tuple[ModelRunner, Sharding | None]:
    """Load the context's model onto the context's device, and return its runner and its sharding.

    The sharding is None for a single process on the CPU, which holds the whole model. Otherwise the model is sharded, and loading is
    collective. A model that this run does not train gets no adapter.

    Raises:
        ModelError: the model can't be loaded.
        PluginNeedsError: the config sets `lora`, and peft is not installed.
        ConfigError: the adapter does not fit the model, or the model's sequences can't be divided among ranks.
        PlanError: `shard_size` does not divide the ranks.
    """
    section = context.model
    if section is None:
        raise ModelError("the training engine was given no model", hint="set model.path")
    runner: ModelRunner
    sharding: Sharding | None = None
    if ranks.size > 1 or torch.device(context.device).type != "cpu":
        runner, sharding = _sharded(config, context, section, ranks)
    else:
        runner = _in_one_piece(config, context, section)
    runner.section = section
    return runner, sharding


def empty_runner(
    model: PreTrainedModel, config: Fsdp2Config, context: PluginContext, dtype: torch.dtype
) -> ModelRunner:
    """Return the runner that computes outputs of a language model on the meta device, with the context's head and the config's adapter."""
    if context.head == "value":
        value_model = empty_value_model(model)
        return ValueRunner(value_model, dtype, _adapter(value_model.trunk, config, context))
    return PolicyRunner(model, dtype, _adapter(model, config, context))


def _in_one_piece(
    config: Fsdp2Config, context: PluginContext, section: ModelSection
) -> ModelRunner:
    device, dtype = torch.device(context.device), getattr(torch, section.dtype)
    runner: ModelRunner
    if context.head == "value":
        value_model = load_value_model(section, device, context.logger)
        runner = ValueRunner(value_model, dtype, _adapter(value_model.trunk, config, context))
    else:
        trunk = load_model(section, device)
        runner = PolicyRunner(trunk, dtype, _adapter(trunk, config, context))
    if config.freeze_vision:
        freeze_vision(runner.trunk)
    if runner.adapter is not None and runner.adapter.section.base is not None:
        weights = {name: m.weight for name, m in quantisable(runner.trunk, runner.output_layer)}
        for name, layer in make_room(runner.trunk, runner.output_layer).items():
            layer.fill(weights.pop(name).detach(), dtype, device)
    if runner.adapter is not None and dtype != torch.float32:
        narrow_frozen(runner.trunk, dtype)
    _prepare(runner, config, device, None)
    _after_probing(runner, config, context)
    return runner


def _sharded(
    config: Fsdp2Config, context: PluginContext, section: ModelSection, ranks: Ranks
) -> tuple[ModelRunner, Sharding]:
    """Build the model without weights, shard it, and then load the weights into the shards."""
    device, dtype = torch.device(context.device), getattr(torch, section.dtype)
    with ranks.together():
        model = empty_model(section)
        valued = context.head == "value"
        trunk = base_of(model) if valued else model
        places, narrow = _places(model, trunk, section, dtype)
    readable = ranks.smallest(int(places is not None)) == 1
    with ranks.together():
        runner = empty_runner(model, config, context, dtype)
        adapter = runner.adapter
        if adapter is not None and readable:
            _narrow(tensors_of(trunk, adapter), narrow, dtype)
        if config.freeze_vision:
            freeze_vision(trunk)
        rounded = _make_room(runner, places, section)
        _prepare(runner, config, device, ranks)
    runner.parallel = sequence_parallel(context.mesh, context.rank, trunk)
    sharding = Sharding(config, ranks, device)
    sharding.apply(runner)
    sharding.materialise()
    runner.device = device
    tensors = tensors_of(trunk, adapter)
    if rounded and places is not None:
        with ranks.together(), StoredCheckpoint(section) as checkpoint:
            for name, layer in rounded.items():
                layer.fill(checkpoint.tensor(places[name]), dtype, device)
    if readable and places is not None:
        with ranks.together():
            read_shards(tensors, places, section)
    else:
        context.logger.info(
            f"the files of {section.path} are not safetensors with transformers' tensor names and shapes: rank 0 loads the whole model"
        )
        give_out(trunk, tensors, section, ranks, device, base_only=valued)
    if adapter is not None:
        adapter.reset()
    if valued:
        with ranks.together():
            fill_head(cast("ValueModel", runner.model).value_head, section, context.logger)
    runner.probe()
    _after_probing(runner, config, context)
    sharding.free()
    return runner, sharding


def _make_room(
    runner: ModelRunner,
    places: Mapping[str, str] | None,
    section: ModelSection,
) -> dict[str, Nf4Linear]:
    """Replace frozen linear layers by 4-bit layers without weights if `lora.base` is set.

    Returns:
        The new layers, by the names of their weights in the model without the adapter; empty if `lora.base` is not set.

    Raises:
        ConfigError: `places` is None: the checkpoint does not store the tensors as they are in memory.
    """
    adapter = runner.adapter
    if adapter is None or adapter.section.base is None:
        return {}
    if places is None:
        raise ConfigError(
            f"lora.base={adapter.section.base} can't quantise {section.path}; expected safetensors with transformers' names and shapes",
            hint="save the model as safetensors with the tensor names and shapes that transformers uses, or leave lora.base out",
        )
    made = make_room(runner.trunk, runner.output_layer)
    return {str(adapter.base_name(f"{name}.weight")): layer for name, layer in made.items()}


def _places(
    model: PreTrainedModel, trunk: PreTrainedModel, section: ModelSection, dtype: torch.dtype
) -> tuple[dict[str, str] | None, frozenset[str]]:
    """Return the result of `stored_places`, and the names in memory of the tensors that the checkpoint stores in `dtype`."""
    with StoredCheckpoint(section) as checkpoint:
        places = stored_places(model, trunk, checkpoint)
        stored = (places or {}).items()
        narrow = frozenset(name for name, place in stored if checkpoint.dtype(place) == dtype)
    return places, narrow


def _narrow(tensors: Mapping[str, Tensor], names: frozenset[str], dtype: torch.dtype) -> None:
    """Convert the frozen tensors in `names` to `dtype`, in which the checkpoint stores them: float32 copies would add no precision."""
    for name, tensor in tensors.items():
        if name in names and not tensor.requires_grad:
            tensor.data = tensor.data.to(dtype)


def _prepare(
    runner: ModelRunner, config: Fsdp2Config, device: torch.device, ranks: Ranks | None
) -> None:
    # With sequence parallelism, a recomputed layer repeats its collectives, so that all ranks must recompute the same layers.
    talking = ranks is not None and config.sequence_parallel_size > 1
    agreed = ranks.smallest if ranks is not None and talking else None
    if config.float8 is not None:
        multiply_in_float8(blocks_of(runner.trunk), device)
    prepare_layers(runner.trunk, config, device, agreed)
    runner.room = room_for_logits(runner.trunk, config, device)


def _after_probing(runner: ModelRunner, config: Fsdp2Config, context: PluginContext) -> None:
    if config.gradient_checkpointing in (True, "selective"):
        # Recomputed layers write no cache of keys and values, which shared prompts need.
        runner.can_share_prompts = False
    if config.packing != "never" and runner.packs.why_not is not None:
        context.logger.info(f"samples are padded, not packed: {runner.packs.why_not}")


def _adapter(
    trunk: PreTrainedModel, config: Fsdp2Config, context: PluginContext
) -> PeftAdapter | None:
    if config.lora is None or not context.trained:
        return None
    return PeftAdapter(trunk, config.lora, seed=context.seed)
