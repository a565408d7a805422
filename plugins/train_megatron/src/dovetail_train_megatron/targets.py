"""The layers that can have adapters: Hugging Face's linear layers, and Megatron's layers that contain them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs
from torch import nn

from dovetail.errors import ConfigError
from dovetail_torch_engines import ALL_LINEAR, LoraSection
from dovetail_train_megatron.architecture import Architecture
from dovetail_train_megatron.low_rank import Fuse, LinearSlice, by_groups, side_by_side

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
DENSE = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@attrs.frozen(kw_only=True)
class TargetLayer:
    """One of Megatron's linear layers, and the Hugging Face layers that it fuses."""

    module: nn.Module
    linears: tuple[LinearSlice, ...]
    """The Hugging Face layers, in the order in which Megatron's layer fuses them."""
    fuse: Fuse
    """The function that combines the outputs of Hugging Face's layers in the order of Megatron's layer."""
    divided: int
    """The dimension of the weight that tensor-parallel ranks divide: 0 rows, 1 columns."""


def linear_layers(architecture: Architecture) -> dict[str, int]:
    """Return the number of input features of every linear layer that can have an adapter, by Hugging Face name, in Hugging Face's order."""
    hf = architecture.hf
    attended = int(hf.num_attention_heads) * architecture.head_size
    inputs = {"self_attn.o_proj": attended, "mlp.down_proj": int(hf.intermediate_size)}
    return {
        f"model.layers.{number}.{name}": inputs.get(name, int(hf.hidden_size))
        for number, dense in enumerate(_dense_layers(architecture))
        for name in (*ATTENTION, *(DENSE if dense else ()))
    }


def _dense_layers(architecture: Architecture) -> list[bool]:
    """Return for every layer of the model whether it has a dense feed-forward network instead of experts."""
    transformer = architecture.transformer
    layers = int(architecture.hf.num_hidden_layers)
    if transformer.num_moe_experts is None:
        return [True] * layers
    pattern: Any = transformer.moe_layer_freq
    if isinstance(pattern, int):
        return [bool(number % pattern) for number in range(layers)]
    return [not mixed for mixed in pattern]


def chosen(
    section: LoraSection, every: Mapping[str, int], architecture: Architecture
) -> frozenset[str]:
    """Return the names of the layers in `every` (see `linear_layers`) that a `lora` section selects.

    Raises:
        ConfigError: a name of the section matches no layer, or `all-linear` includes experts.
    """
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in every))
    found: set[str] = set()
    if ALL_LINEAR in section.target_modules:
        if not all(_dense_layers(architecture)):
            raise ConfigError(
                f"lora.target_modules={ALL_LINEAR} includes layers of experts, which can't be adapted",
                hint="name the layers to adapt one by one, such as [q_proj, k_proj, v_proj, o_proj]",
            )
        found |= set(every)
    for target in section.target_modules:
        if target == ALL_LINEAR:
            continue
        named = {name for name in every if name == target or name.endswith(f".{target}")}
        if not named:
            raise ConfigError(
                f"lora.target_modules names {target!r}, but the engine megatron can adapt no layer of that name in this model",
                hint=f"set lora.target_modules to {ALL_LINEAR}, or to some of: {', '.join(kinds)}; the engine fsdp2 can also adapt output layers and "
                "embeddings",
            )
        found |= named
    out = section.exclude_modules
    return frozenset(name for name in found if not (out and re.fullmatch(out, name)))


def places(layer: Any, architecture: Architecture, tp: int) -> list[TargetLayer]:
    """Return the linear layers within one decoder layer that can have adapters, with the feature counts of one of `tp` ranks.

    Args:
        layer: one of Megatron's decoder layers on this rank.
        architecture: the model's architecture.
        tp: the number of tensor-parallel ranks.
    """
    hf = architecture.hf
    prefix = f"model.layers.{int(layer.layer_number) - 1}"
    hidden, size = int(hf.hidden_size), architecture.head_size
    heads, groups = int(hf.num_attention_heads) // tp, int(hf.num_key_value_heads) // tp
    attention = layer.self_attention

    def linears(inputs: int, **outputs: int) -> tuple[LinearSlice, ...]:
        part = "mlp" if set(outputs) & {"gate_proj", "down_proj"} else "self_attn"
        return tuple(
            LinearSlice(name=f"{prefix}.{part}.{name}", inputs=inputs, outputs=features)
            for name, features in outputs.items()
        )

    found = [
        TargetLayer(
            module=attention.linear_qkv,
            linears=linears(
                hidden, q_proj=heads * size, k_proj=groups * size, v_proj=groups * size
            ),
            fuse=by_groups(groups),
            divided=0,
        ),
        TargetLayer(
            module=attention.linear_proj,
            linears=linears(heads * size, o_proj=hidden),
            fuse=side_by_side,
            divided=1,
        ),
    ]
    if hasattr(layer.mlp, "linear_fc1"):
        inner = int(hf.intermediate_size) // tp
        found += [
            TargetLayer(
                module=layer.mlp.linear_fc1,
                linears=linears(hidden, gate_proj=inner, up_proj=inner),
                fuse=side_by_side,
                divided=0,
            ),
            TargetLayer(
                module=layer.mlp.linear_fc2,
                linears=linears(inner, down_proj=hidden),
                fuse=side_by_side,
                divided=1,
            ),
        ]
    return found
