"""ModelShape: a model's layers and sizes, according to its config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from dovetail.dispatch.registration import Unit
from dovetail.sections.adapter import PlannedAdapter

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number, for each dtype that `model.dtype` may name."""


@attrs.frozen(kw_only=True)
class WeightLayer:
    """A layer with one weight matrix: linear, or an embedding."""

    inputs: int
    """Number of input features; for an embedding, the number of its rows."""
    outputs: int
    """Number of output features."""
    linear: bool
    """Whether the layer is linear and not the model's output layer."""
    shared: bool
    """Whether another layer has the same weight, as with a tied output layer."""


@attrs.frozen(kw_only=True)
class Weight:
    """A parameter, and its names in checkpoints."""

    names: tuple[str, ...]
    """Every name of the parameter in checkpoints, the model's own first; a tied weight has the names of all parameters tied to it."""
    shape: tuple[int, ...]
    required: bool
    """Whether a checkpoint without the parameter is incomplete."""
    above_base: bool
    """Whether the parameter belongs to the language-model head, which a value model leaves out."""


@attrs.frozen(kw_only=True)
class ModelShape:
    """The sizes of a causal language model, from its config."""

    parameters: int
    """Number of parameters, each counted once; buffers are not counted."""
    head_parameters: int
    """Number of parameters of the output layer; 0 if its weight is tied to the embedding."""
    layers: Mapping[str, WeightLayer]
    """Every layer with one weight matrix, by its name."""
    modules: frozenset[str]
    """Names of all modules."""
    matrices: frozenset[str]
    """Names of the modules with a weight matrix of their own: those in `layers`, and others such as expert routers, which peft often adapts
    as parameters."""
    vocabulary: int
    """Number of token ids with an embedding, padding included."""
    stored_dtype: str | None
    """The dtype that the config says the weights are stored in."""
    cached_per_token: int
    """Number of elements that generation caches for each token: keys and values of all layers."""
    kv_heads: int
    """Number of key-value heads; 0 if there are none."""
    quantisation: Any
    """The config's `quantization_config`, in transformers' form; None if the weights are not quantised."""
    weights: tuple[Weight, ...]
    """Parameters that checkpoints hold in the same form as the model. If transformers renames or merges tensors while
    loading, only the embedding is listed; for a quantised model, nothing."""

    def matching(self, target: str) -> frozenset[str]:
        """Return the names of the modules that an adapter's target matches: by full name, or by last name parts, such as `q_proj`."""
        return frozenset(
            name for name in self.modules if name == target or name.endswith(f".{target}")
        )

    def adapted_layers(self, adapter: PlannedAdapter) -> tuple[str, ...]:
        """Return the names of the layers that an adapter adapts; empty if the adapter's config does not say which."""
        named = {name for target in adapter.target_modules for name in self.matching(target)}
        return tuple(
            name
            for name, layer in self.layers.items()
            if (name in named or (adapter.all_linear and layer.linear))
            and not (adapter.excluded and re.fullmatch(adapter.excluded, name))
        )

    def adapter_parameters(self, adapter: PlannedAdapter) -> int:
        """Return an adapter's number of parameters: A [rank, in] and B [out, rank] of each adapted layer, and DoRA's magnitudes [out]."""
        rank = adapter.rank or 0
        layers = [self.layers[name] for name in self.adapted_layers(adapter)]
        return sum(
            rank * (layer.inputs + layer.outputs) + (layer.outputs if adapter.dora else 0)
            for layer in layers
        )

    @property
    def linear_parameters(self) -> int:
        """Number of weights in linear layers, without the output layer."""
        layers = [layer for layer in self.layers.values() if layer.linear and not layer.shared]
        return sum(layer.inputs * layer.outputs for layer in layers)


@attrs.frozen(kw_only=True)
class UpdateSize:
    """Upper bounds on the work of a rank, in one micro-batch and between two optimizer steps."""

    prompts: int
    """Number of distinct prompts between two optimizer steps."""
    responses: int
    """Number of responses to each prompt."""
    prompt_tokens: int
    response_tokens: int
    budget: int
    """Largest number of tokens of a micro-batch."""
    unit: Unit = "sample"
    """Which samples stay in one micro-batch, as in `ObjectiveSpec`."""


@attrs.frozen(kw_only=True)
class WorkingMemory:
    """The memory that a rank uses while it computes, besides weights, gradients and the optimizer's state."""

    parts: Mapping[str, int]
    """Bytes by purpose, such as `activations`."""
    spare: int = 0
    """Bytes of `parts` that the engine can do without if memory is short."""


@attrs.frozen(kw_only=True)
class MemoryRules:
    """How a generation engine, such as vLLM, shares a rank's accelerator and the accelerator's memory with training models."""

    sleeps: bool = False
    """Whether the engine leaves the accelerator while models compute."""
    sleep_key: str | None = None
    """Config key that makes the engine leave the accelerator; None if the engine can't leave."""
    share: float | None = None
    """Share of an accelerator's memory that the engine takes; None if the engine takes what it needs."""
    engines: int = 1
    """Number of engines on an accelerator, each with the share `share`."""
    bounded: bool = False
    """Whether engines take no more of their share than their samples need."""
    share_key: str = ""
    """Config key of `share`."""
