"""ModelShape: a model's layers and sizes, as its config tells them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from dovetail.sections.adapter import PlannedAdapter

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number, for each dtype that `model.dtype` may name."""


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
    """The sizes of a causal language model, from its config."""

    parameters: int
    """All of them, each once; buffers are not counted."""
    head_parameters: int
    """Those of the parameters that belong to an output layer whose weight is not tied to an embedding."""
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
        """Return the modules that an adapter's target names: by their full name, or by its last parts, such as `q_proj`."""
        return frozenset(
            name for name in self.modules if name == target or name.endswith(f".{target}")
        )

    def adapted_layers(self, adapter: PlannedAdapter) -> tuple[str, ...]:
        """Return names of the layers that an adapter is put on; empty where the config does not say."""
        named = {name for target in adapter.target_modules for name in self.matching(target)}
        return tuple(
            name
            for name, layer in self.layers.items()
            if (name in named or (adapter.all_linear and layer.linear))
            and not (adapter.excluded and re.fullmatch(adapter.excluded, name))
        )

    def adapter_parameters(self, adapter: PlannedAdapter) -> int:
        """Return parameters of A [rank, in] and B [out, rank] of every adapted layer, and with DoRA of its magnitudes [out]."""
        rank = adapter.rank or 0
        layers = [self.layers[name] for name in self.adapted_layers(adapter)]
        return sum(
            rank * (layer.inputs + layer.outputs) + (layer.outputs if adapter.dora else 0)
            for layer in layers
        )

    @property
    def linear_parameters(self) -> int:
        """Weights of linear layers, without the output layer's."""
        layers = [layer for layer in self.layers.values() if layer.linear and not layer.shared]
        return sum(layer.inputs * layer.outputs for layer in layers)


@attrs.frozen(kw_only=True)
class UpdateSize:
    """The most that a rank computes at once, and in total between two steps of its optimizer."""

    prompts: int
    """Distinct prompts."""
    responses: int
    """Responses to each."""
    prompt_tokens: int
    response_tokens: int
    budget: int
    """Tokens of a micro-batch."""


@attrs.frozen(kw_only=True)
class WorkingMemory:
    """The memory that a rank uses while it computes, besides weights, gradients and the optimizer's state."""

    parts: Mapping[str, int]
    """Bytes by purpose, such as `activations`."""
    spare: int = 0
    """Bytes of them that the engine does without by itself where memory is short."""


@attrs.frozen(kw_only=True)
class MemoryRules:
    """When an engine of a source is on a rank's accelerator, and how much of its memory the engine uses."""

    sleeps: bool = False
    """Whether it leaves the accelerator while models compute."""
    sleep_key: str | None = None
    """The key that makes it do so; None where it can't."""
    share: float | None = None
    """The share of an accelerator that it takes; None where it takes what it needs."""
    engines: int = 1
    """How many of them are on an accelerator, each with that share."""
    bounded: bool = False
    """Whether they take no more of it than their samples need."""
    share_key: str = ""
    """The key of that share."""
