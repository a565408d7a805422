"""Adapters in peft's form: a directory with `adapter_config.json` and `adapter_model.safetensors`, which peft, vLLM and SGLang load."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dovetail.errors import CheckpointError, ConfigError
from dovetail.interfaces import PluginContext
from dovetail_torch_engines.adapter import described, wire_name
from dovetail_torch_engines.lora import ALL_LINEAR, LoraSection
from dovetail_torch_engines.safetensors_files import SafetensorsStore
from dovetail_torch_engines.state import WEIGHTS

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_KEYS = {
    "rank": ("r", 8),
    "alpha": ("lora_alpha", 8),
    "rank_stabilised": ("use_rslora", False),
    "dora": ("use_dora", False),
}
"""Keys of `LoraSection`, each with peft's key and peft's default."""


def write_adapter(
    saved: Path, directory: Path, section: LoraSection | None, context: PluginContext
) -> None:
    """Write the adapter of a training state in peft's format, and the tokenizer if there is one.

    Args:
        saved: the directory of a training state in the format of `dovetail_torch_engines.state`.
        directory: the directory to write the adapter to.
        section: the `lora` section of the config; None if all weights are trained.
        context: the plugin's context, with the kind of the model's head, the base model and the tokenizer.

    Raises:
        ConfigError: no adapter is trained, or a value head is trained besides the adapter.
        CheckpointError: the state is damaged or has no adapter, or the directory can't be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    without = "leave out --adapter to export the whole model"
    if section is None:
        raise ConfigError(
            f"role {context.role or 'actor'!r} has no adapter to export: it is trained without one",
            hint=without,
        )
    if context.head == "value":
        raise ConfigError(
            "the adapter of a critic can't be exported: peft's format can't hold a value head",
            hint=without,
        )
    store = SafetensorsStore(saved / WEIGHTS)
    names = store.names
    if whole := [name for name in names if ".lora_" not in name]:
        raise CheckpointError(
            f"checkpoint {saved} can't be exported as an adapter: its tensor {whole[0]!r} belongs to no adapter",
            hint=without,
        )
    tensors = dict(zip(map(wire_name, names), store.read(names), strict=True))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / TENSORS, metadata={"format": "pt"})
        layers = {name.partition(".lora_")[0] for name in names}
        config = json.dumps(_config(section, layers, context), indent=2)
        (directory / CONFIG).write_text(config + "\n")
        if context.tokenizer is not None:
            context.tokenizer.save_pretrained(str(directory))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the adapter can't be exported to {directory}: {error}",
            hint="see that there is room on the disk",
        ) from error


def adapter_tensors(
    section: LoraSection, expected: Mapping[str, Iterable[int]]
) -> dict[str, Tensor]:
    """Return the tensors of the adapter at `section.adapter_path`, float32 on the CPU, by their names in peft's checkpoints.

    Args:
        section: a `lora` section with an `adapter_path`.
        expected: the expected unsharded shapes, by tensor name in peft's checkpoints.

    Raises:
        ConfigError: the adapter is missing, or does not match the section or the expected shapes.
        CheckpointError: the adapter's files can't be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    directory = Path(str(section.adapter_path))
    key = f"lora.adapter_path={directory}"
    if not (directory / CONFIG).is_file() or not (directory / TENSORS).is_file():
        raise ConfigError(
            f"{key} holds no adapter; expected a directory with {CONFIG} and {TENSORS}",
            hint="name the directory of an adapter that peft or `dovetail export --adapter` saved",
        )
    try:
        config: Any = json.loads((directory / CONFIG).read_text())
        tensors = load_file(directory / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the adapter {directory} can't be read: {error}") from error
    _check_config(key, config, section)
    shapes = {name: tuple(shape) for name, shape in expected.items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [f"the tensor {name!r} is missing" for name in sorted(shapes.keys() - found.keys())]
    wrong += [
        f"the tensor {name!r} is not expected" for name in sorted(found.keys() - shapes.keys())
    ]
    wrong += [
        f"the tensor {name!r} has shape {found[name]}; expected {shape}"
        for name, shape in shapes.items()
        if found.get(name, shape) != shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ConfigError(
            f"{key} does not fit the model and the layers of lora.target_modules: {wrong[0]}{more}",
            hint=f"use the adapter's own base model, {config.get('base_model_name_or_path')}, and its target_modules, "
            f"{config.get('target_modules')}, or name another adapter",
        )
    return {name: tensor.float() for name, tensor in tensors.items()}


def _config(section: LoraSection, layers: Iterable[str], context: PluginContext) -> dict[str, Any]:
    """Return the content of `adapter_config.json` for an adapter on these layers."""
    named = [name for name in section.target_modules if name != ALL_LINEAR]
    if ALL_LINEAR in section.target_modules:
        # `all-linear` is written as layer names: readers other than peft don't know the word.
        named = sorted({*named, *described(section, layers).target_modules})
    model = context.model
    values = {theirs: getattr(section, ours) for ours, (theirs, _) in _KEYS.items()}
    if section.alpha == int(section.alpha):
        values["lora_alpha"] = int(section.alpha)
    return values | {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.path if model is not None else None,
        "revision": model.revision if model is not None else None,
        "target_modules": named,
        "exclude_modules": section.exclude_modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def _check_config(key: str, config: Any, section: LoraSection) -> None:
    """Check that an adapter is a LoRA adapter with the rank, scale and form that the section sets.

    Args:
        key: the setting that names the adapter, for errors.
        config: the content of the adapter's `adapter_config.json`.
        section: the `lora` section of the run's config.

    Raises:
        ConfigError: they differ.
    """
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ConfigError(
            f"{key} is not a LoRA adapter: its {CONFIG} does not say peft_type LORA",
            hint="name a LoRA adapter",
        )
    for name in ("rank_pattern", "alpha_pattern"):
        if config.get(name):
            raise ConfigError(
                f"{key} has a {name}: its layers differ in rank or scale; expected one rank and scale for all layers",
                hint="name another adapter, or merge this one into the model",
            )
    differing = {
        ours: value
        for ours, (theirs, default) in _KEYS.items()
        if (value := config.get(theirs, default)) != getattr(section, ours)
    }
    if differing:
        said = "; ".join(
            f"{k}={v}, but the config sets {k}={getattr(section, k)}" for k, v in differing.items()
        )
        raise ConfigError(
            f"{key} has {said}",
            hint="set " + " ".join(f"lora.{k}={json.dumps(v)}" for k, v in differing.items()),
        )
