"""Determines the shape of a model from its config, by building the model on torch's meta device, which takes no memory."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError, ModelError
from dovetail.interfaces import ModelShape, Weight, WeightLayer
from dovetail.sections import ModelSection


def read_shape(section: ModelSection) -> ModelShape:
    """Return the sizes of a model, from its config alone; the last 8 models are cached.

    Raises:
        ConfigError: the model's architecture lacks a key of `override_config`, or ignores it.
        ModelError: transformers can't read the model, or can't construct it from its config.
    """
    changed = 0
    with suppress(OSError, RuntimeError):  # `read_config` raises the error
        changed = (Path(section.path).expanduser() / "config.json").stat().st_mtime_ns
    overrides = json.dumps(section.override_config, sort_keys=True)
    return _read(section.path, section.revision, section.trust_remote_code, overrides, changed)


@lru_cache(maxsize=8)
def _read(
    path: str,
    revision: str | None,
    trusted: bool,
    overrides: str,
    changed: int,  # noqa: ARG001 - part of the key
) -> ModelShape:
    import torch

    from dovetail_datasets.models.classes import model_class
    from dovetail_datasets.models.config import read_config

    section = ModelSection(
        path=path,
        revision=revision,
        trust_remote_code=trusted,
        override_config=json.loads(overrides),
    )
    try:
        config = read_config(section)
        with torch.device("meta"):
            # Attention kernels do not change shapes, and the model's own may not be installed here.
            model = model_class(config).from_config(
                config, attn_implementation="eager", trust_remote_code=trusted
            )
        return _shape(config, model)
    except ConfigError:
        raise
    except Exception as error:
        raise ModelError(
            f"the model path {path!r} holds no model that transformers can read: {type(error).__name__}: {error}",
            hint="give a directory with config.json, or a hub id",
        ) from error


def has_matrix(module: Any) -> bool:
    """Return whether a module has its own weight matrix, to which an adapter can be attached."""
    weight = getattr(module, "weight", None)
    return weight is not None and weight.dim() == 2


def _shape(config: Any, model: Any) -> ModelShape:
    text = config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    own_head = head is not None and head.weight is not embedding.weight
    # A model without attention caches no keys and values.
    heads = getattr(text, "num_attention_heads", None) or 0
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    stored = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        head_parameters=head.weight.numel() if own_head else 0,
        layers=dict(_layers(model, head)),
        modules=frozenset(name for name, _ in model.named_modules() if name),
        matrices=frozenset(name for name, m in model.named_modules() if name and has_matrix(m)),
        vocabulary=embedding.weight.shape[0],
        stored_dtype=str(stored).removeprefix("torch.") if stored is not None else None,
        cached_per_token=2 * text.num_hidden_layers * kv_heads * head_dim,
        kv_heads=kv_heads,
        quantisation=getattr(config, "quantization_config", None),
        weights=tuple(_weights(config, model)),
    )


def _weights(config: Any, model: Any) -> Iterator[Weight]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    if getattr(config, "quantization_config", None) is not None:
        return
    converted = bool(get_model_conversion_mapping(model, add_legacy=False))
    parameters = [model.get_input_embeddings().weight] if converted else model.parameters()
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    base = f"{model.base_model_prefix}."
    optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    for parameter in parameters:
        own = names[id(parameter)]
        # Checkpoints of the base model have names without its prefix. A base model also reads checkpoints whose names have it.
        spellings = [n for name in own for n in (name, f"{base}{name}", name.removeprefix(base))]
        left_out = any(re.search(pattern, name) for pattern in optional for name in own)
        yield Weight(
            names=tuple(dict.fromkeys(spellings)),
            shape=tuple(parameter.shape),
            required=not converted and not left_out,
            above_base=not any(name.startswith(base) for name in own),
        )


def _layers(model: Any, head: Any) -> Iterator[tuple[str, WeightLayer]]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    users = Counter(id(tensor) for tensor in model.state_dict(keep_vars=True).values())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            outputs, inputs = module.weight.shape
        elif isinstance(module, (Conv1D, nn.Embedding)):
            inputs, outputs = module.weight.shape
        else:
            continue
        linear = module is not head and not isinstance(module, nn.Embedding)
        shared = users[id(module.weight)] > 1
        yield name, WeightLayer(inputs=inputs, outputs=outputs, linear=linear, shared=shared)
