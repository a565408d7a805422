"""Preparing a model's decoder layers for training: Liger's kernels, compilation, and recomputation of activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dovetail_torch_engines import CHUNK_BYTES
from dovetail_train_fsdp2.attention import PACKED, make_known, packed_attention, register
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.liger import apply_liger
from dovetail_train_fsdp2.memory import MemoryBudget
from dovetail_train_fsdp2.recompute import SLACK, How, Recompute, tokens_of
from dovetail_train_fsdp2.sharding import blocks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BACKEND = "inductor"
"""The backend of torch.compile."""
TOKENS_AT_LEAST = 64
"""The smallest number of tokens for which compiled code is used."""
RECOMPILES = 64
"""The limit of compiled versions of one layer's code: one for each kind of layer, mask and layout."""
HEAD_BYTES_A_WEIGHT = 12
"""Bytes of gradients per weight of the output layer's or the embedding's matrix: float32 sums over chunks and over micro-batches,
and twice the compute dtype if both layers share the matrix."""


def prepare_layers(
    trunk: PreTrainedModel,
    config: Fsdp2Config,
    device: torch.device,
    agreed: Callable[[int], int] | None = None,
) -> Recompute | None:
    """Compile, recompute or replace parts of the decoder layers as configured. Call it before the layers are sharded.

    Args:
        trunk: the model with the layers.
        config: the config of the engine.
        device: the device of the layers.
        agreed: a collective function that returns the smallest of all ranks' numbers; needed if layers communicate.

    Returns:
        The object that decides which activations are kept; None if all activations are kept.

    Raises:
        PluginNeedsError: the config sets `liger`, and Liger is not installed.
        ConfigError: the config sets `liger`, and Liger can't run.
        ModelError: the model's decoder layers can't be found.
    """
    accelerated = device.type != "cpu"
    if config.liger:
        apply_liger(trunk, device.type)
    how = how_of(config, accelerated=accelerated)
    if how == "nothing" and not config.compile:
        return None
    layers = blocks_of(trunk)
    if config.compile:
        compile_layers(layers)
    if how == "nothing":
        return None
    return Recompute(
        layers,
        how,
        memory=MemoryBudget(device, config.memory_limit_gib) if how is None else None,
        outside=_outside(trunk),
        offload=config.offload_activations,
        agreed=agreed or (lambda number: number),
    )


def room_for_logits(
    trunk: PreTrainedModel, config: Fsdp2Config, device: torch.device
) -> Callable[[], int]:
    """Return a function that computes how many bytes of logits fit into memory beside the layers' activations.

    The function returns 0 if the config keeps no logits (`keep_logits`), and on a CPU.
    """
    if device.type == "cpu" or not config.keep_logits:
        return lambda: 0
    memory, outside = MemoryBudget(device, config.memory_limit_gib), _outside(trunk)
    return lambda: max(0, int(memory.free() * (1 - SLACK)) - outside)


def _outside(trunk: PreTrainedModel) -> int:
    """Return the bytes to leave free for the output layer: a chunk of logits, and the gradients of the largest weight matrix."""
    largest = max(int(parameter.numel()) for parameter in trunk.parameters())
    return CHUNK_BYTES + HEAD_BYTES_A_WEIGHT * largest


def how_of(config: Fsdp2Config, *, accelerated: bool) -> How | None:
    """Return which activations every layer recomputes under `gradient_checkpointing`; None to decide by free memory."""
    match config.gradient_checkpointing:
        case False:
            return "nothing"
        case True:
            return "everything"
        case "selective":
            # The compiler itself recomputes cheap results.
            return "nothing" if config.compile else "cheap"
        case _:
            return None if accelerated else "nothing"


def compile_layers(layers: list[nn.Module]) -> None:
    """Compile each layer's `forward`, for any number of tokens.

    Layers of one class share the code that is compiled for the first such layer.
    """
    # Raised, because the limit counts all versions of a function, and the models of one process share functions.
    dynamo = torch._dynamo.config  # noqa: SLF001 - its public name
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILES)
    # Packed attention is not traced: its kernels depend on the pack's lengths, so that every pack would be compiled anew.
    make_known()
    register(PACKED, torch.compiler.disable(packed_attention))  # type: ignore[no-untyped-call]
    for layer in layers:
        layer.forward = _compiled(layer.forward)


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(forward, dynamic=True, backend=BACKEND)

    def run(*args: object, **kwargs: object) -> Any:
        # With a cache, each layer's index in it would require a version of its own. Inputs of few tokens, such as
        # tests of the architecture, are not worth a version.
        as_it_is = (
            kwargs.get("past_key_values") is not None or tokens_of(args, kwargs) < TOKENS_AT_LEAST
        )
        return (forward if as_it_is else compiled)(*args, **kwargs)

    return run
