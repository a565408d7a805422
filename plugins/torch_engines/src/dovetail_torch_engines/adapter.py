"""Low-rank adapters, the same in every engine: names and description of their tensors, and initial values of their matrices.

A layer's weight W [out, in] becomes W + s · B A, with A [r, in] and B [out, r] (arXiv 2106.09685). Training states name a tensor as
a peft model does: `layers.0.q_proj.lora_A.default.weight`. Weight updates to a rollout name the tensor as peft's checkpoints do:
`base_model.model.layers.0.q_proj.lora_A.weight`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError
from dovetail.interfaces import AdapterSpec
from dovetail_torch_engines.lora import LoraSection

ADAPTER = "default"
"""The name that peft gives to a model's only adapter."""
MAGNITUDE = "lora_magnitude_vector"
"""peft's name for the magnitudes of DoRA (arXiv 2402.09353), [out]."""
_WIRE_PREFIX = "base_model.model."
_OWN = ".lora_"
"""Start of the part of a tensor's name that belongs to the adapter."""


def state_name(layer: str, kind: str) -> str:
    """Return the name of an adapter's tensor in training states, such as `layers.0.q_proj.lora_A.default.weight`.

    Args:
        layer: the name of the adapted layer.
        kind: `lora_A`, `lora_B` or `lora_magnitude_vector`.
    """
    return f"{layer}.{kind}.{ADAPTER}.weight"


def wire_name(name: str) -> str:
    """Convert the name of an adapter's tensor in training states to the name in peft's checkpoints."""
    layer, own, rest = name.rpartition(_OWN)
    kind, _, rest = rest.partition(".")
    rest = rest.removeprefix(ADAPTER).removeprefix(".")
    # Magnitudes are not a module in peft's checkpoints, so that their names do not end in `weight`.
    last = f".{rest}" if rest and own + kind != f".{MAGNITUDE}" else ""
    return f"{_WIRE_PREFIX}{layer}{own}{kind}{last}"


def described(section: LoraSection, layers: Iterable[str]) -> AdapterSpec:
    """Return the description that a rollout engine needs to apply an adapter's tensors.

    Args:
        section: the `lora` section of the config, with rank and scale.
        layers: the names of the adapted layers.
    """
    return AdapterSpec(
        rank=section.rank,
        alpha=section.alpha,
        rank_stabilised=section.rank_stabilised,
        dora=section.dora,
        target_modules=tuple(sorted({name.rpartition(".")[2] for name in layers})),
    )


def drawn_a(rank: int, inputs: int, generator: torch.Generator) -> Tensor:
    """Return the initial A, float32 [rank, inputs] on the CPU: uniform within ±1 / √inputs, as in a linear layer of torch.

    Engines draw the A of each layer in the model's order from one generator, so that all engines start alike. The initial B is 0.
    """
    start_RI = torch.empty(rank, inputs)
    nn.init.kaiming_uniform_(start_RI, a=math.sqrt(5), generator=generator)
    return start_RI


def no_matrix(target: str, module: str, layers: Iterable[str]) -> ConfigError:
    """Return the error for a `lora.target_modules` entry that names a module without a weight matrix, such as `mlp`.

    Args:
        target: the entry of `lora.target_modules`.
        module: the full name of the module.
        layers: the full names of the model's linear layers; the error suggests those inside the module.
    """
    inside = {name.rpartition(".")[2] for name in layers if name.startswith(f"{module}.")}
    return ConfigError(
        f"lora.target_modules names {target!r}, but the model's module {module!r} has no weight matrix",
        hint=f"name the layers inside this module: {', '.join(sorted(inside))}"
        if inside
        else "name linear layers or embeddings",
    )


def shared_weight(layer: str) -> ConfigError:
    """Return the error for a `lora.target_modules` entry whose weight is shared with another layer, such as a tied output layer."""
    return ConfigError(
        f"lora.target_modules names {layer!r}, which shares its weight with another layer",
        hint="leave this layer out: merging its update would give the two layers different weights",
    )
