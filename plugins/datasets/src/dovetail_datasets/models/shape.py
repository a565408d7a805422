"""ModelShape: a model's layers and sizes, from its config alone: it is built on the meta device, and takes no memory."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs

from dovetail.errors import ConfigError, ModelError
from dovetail.sections import ModelSection

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of a number of each dtype that `model.dtype` may name."""


@attrs.frozen(kw_only=True)
class WeightLayer:
    """A layer with one weight matrix: linear, or an embedding."""

    inputs: int
    """Features that go in; an embedding's rows."""
    outputs: int
    """Features that come out."""
    linear: bool
    """Whether it is linear, and not the model's output layer."""
    shared: bool
    """Whether its weight is another layer's too, as that of a tied output layer is."""


@attrs.frozen(kw_only=True)
class Weight:
    """A parameter, and where checkpoints keep it."""

    names: tuple[str, ...]
    """Every name that a checkpoint may have for it, the model's own first; a tied weight has those of all its ties."""
    shape: tuple[int, ...]
    required: bool
    """Whether a checkpoint without it is incomplete."""
    above_base: bool
    """Whether it belongs to the head of the language model, which a value model leaves out."""


@attrs.frozen(kw_only=True)
class ModelShape:
    """What a config tells of a causal language model."""

    parameters: int
    """All of them, each once; buffers are not counted."""
    head_parameters: int
    """Of them, those of an output layer that shares its weight with no embedding."""
    layers: Mapping[str, WeightLayer]
    """Every layer with one weight matrix, by its name."""
    modules: frozenset[str]
    """Names of all modules."""
    matrices: frozenset[str]
    """Names of those with a weight matrix of their own: `layers`, and what else keeps one, as routers of experts do: peft adapts
    those of many models, as parameters."""
    vocabulary: int
    """Token ids that it has embeddings for, padding included."""
    stored_dtype: str | None
    """The dtype that the config says the weights are stored in."""
    cached_per_token: int
    """Numbers that generation keeps of each token: keys and values of all layers."""
    kv_heads: int
    """Heads that they are divided into; 0 where there are none."""
    quantisation: Any
    """`quantization_config` of its config, in the words of transformers; None where the weights are stored as they are."""
    weights: tuple[Weight, ...]
    """Parameters that checkpoints hold in the same form. All; or, where transformers renames or merges tensors as it loads, the
    embedding alone; none of a quantised model."""

    def matching(self, target: str) -> frozenset[str]:
        """Modules that an adapter's target names: by their whole name, or by its last parts, such as `q_proj`."""
        return frozenset(
            name for name in self.modules if name == target or name.endswith(f".{target}")
        )


def read_shape(section: ModelSection) -> ModelShape:
    """The shape of a model. Nothing is read but its config, and that once where it can be.

    Raises:
        ConfigError: its architecture lacks a key of `override_config`, or ignores it.
        ModelError: it is no model that transformers can read, or its config does not make one.
    """
    changed = 0
    with suppress(OSError, RuntimeError):  # what is wrong with it is said where it is read
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

    from dovetail.media import model_class, read_config

    section = ModelSection(
        path=path,
        revision=revision,
        trust_remote_code=trusted,
        override_config=json.loads(overrides),
    )
    try:
        config = read_config(section)
        with torch.device("meta"):
            # Kernels of attention change no shape, and need not be here.
            model = model_class(config).from_config(
                config, attn_implementation="eager", trust_remote_code=trusted
            )
        return _shape(config, model)
    except ConfigError:
        raise
    except Exception as error:
        raise ModelError(
            f"{path!r} holds no model that transformers can read: {type(error).__name__}: {error}",
            hint="a model is a directory with config.json, or a hub id",
        ) from error


def has_matrix(module: Any) -> bool:
    """Return whether a module has a weight matrix of its own, which an adapter can be put on."""
    weight = getattr(module, "weight", None)
    return weight is not None and weight.dim() == 2


def _shape(config: Any, model: Any) -> ModelShape:
    text = config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    own_head = head is not None and head.weight is not embedding.weight
    # A model without attention keeps no keys and values.
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
        # Checkpoints of the base alone have names without its prefix, and a base reads those with it.
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
