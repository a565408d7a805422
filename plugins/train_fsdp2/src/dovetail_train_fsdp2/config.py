"""Config of the training engine. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

import attrs

from dovetail.errors import PlanError
from dovetail.sections import ABOVE_ZERO, AT_LEAST_ONE
from dovetail_torch_engines import ALL_LINEAR, AdaptableSection, LoraSection, Sync

__all__ = [
    "ALL_LINEAR",
    "Fsdp2Config",
    "LoraSection",
    "Packing",
    "Recompute",
    "Reduce",
    "Share",
    "Sync",
]

Share = Literal["auto", "always", "never"]
Packing = Literal["auto", "always", "never"]
Reduce = Literal["once", "every_micro_batch"]
Recompute = bool | Literal["auto", "selective"]


@attrs.frozen(kw_only=True)
class Fsdp2Config(AdaptableSection):
    """Config of the engine on plain PyTorch: float32 weights, sharded by fully_shard over several ranks, and fused optimizers."""

    unsupported_keys: ClassVar[Mapping[str, str]] = {
        "context_parallel_size": "with fsdp2, set sequence_parallel_size: the number of ranks that share each sequence",
        **dict.fromkeys(
            ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"),
            "fsdp2 shards parameters over all ranks, or over shard_size of them; the engine megatron has this key",
        ),
    }

    gradient_checkpointing: Recompute = "auto"
    """Recompute activations in the backward pass instead of keeping them. `false`: in no layer. `true`: in every layer; least memory, a
    third more time. `selective`: in every layer, but the results of matrix products and attention are kept. `auto`: in as few layers as the
    free memory of the accelerator allows; on the CPU in none.
    """
    memory_limit_gib: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Limit in GiB of the process's allocations on its accelerator, for `gradient_checkpointing: auto` and `keep_logits`; None: all
    free memory."""
    keep_logits: bool = False
    """Keep the logits of as many tokens as memory allows for the backward pass, in the compute dtype, instead of recomputing them:
    a few per cent faster for some GiB. On CUDA only; `memory_limit_gib` limits them too."""
    offload_activations: bool = False
    """Keep the inputs of recomputed layers in the host's memory: for long sequences in large models."""
    compile: bool = False
    """Compile the decoder layers with torch.compile: a fifth faster and with less memory, after half a minute at the first update.
    Compiling saves time in runs of about 50 updates or more."""
    float8: Literal["rowwise"] | None = None
    """Multiply in float8 in the decoder layers, each row scaled by its own maximum (extra `float8`). Less exact; meant for wide
    layers with `compile` on H100s and newer: a 1.5B model is slower than in bfloat16. None computes in `model.dtype`."""
    liger: bool = False
    """Use Liger's kernels for norms, rotary positions and gated layers (extra `liger`; CUDA only). An alternative to `compile`, with a
    similar gain.
    """
    share_prompts: Share = "auto"
    """Compute a prompt once for all of its responses: `auto` if that saves work, `always` if the model allows, or `never`."""
    packing: Packing = "auto"
    """Put the samples of a micro-batch end to end, without padding: `auto` if that costs least, `always` if the architecture
    allows, or `never`. Packing needs `model.attn_implementation: sdpa`, and replaces that attention by its own kernels."""
    freeze_vision: bool = False
    """Freeze the vision tower of a vision-language model, and the projector of its output."""
    shard_size: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Number of neighbouring ranks over which parameters, gradients and moments are sharded; each such group holds a full copy. It
    must divide the number of ranks. None shards over all ranks."""
    reshard_after_forward: bool | None = None
    """Free the gathered parameters of a layer after its forward pass and gather them again for the backward pass: less memory, more
    communication. None: only if they are sharded over several accelerators."""
    reduce_gradients: Reduce = "once"
    """When to add up gradients over ranks. `once`: at the end of an update; with several micro-batches every rank then holds a
    whole float32 gradient. `every_micro_batch`: each rank holds only its shard."""
    cpu_offload: bool = False
    """Keep shards, gradients and moments in host memory and run the optimizer there; layers are copied to the accelerator when
    needed. Slow: only for models that do not fit otherwise."""
    sequence_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Number of ranks that share each sequence (Ulysses, arXiv 2309.14509). It must divide the number of ranks and of attention
    heads. Above 1, samples are always packed."""

    def __attrs_post_init__(self) -> None:
        """Check that `lora` is not set with `float8`, nor `lora.base` with `compile`: the engine does not support these together."""
        if self.float8 is not None and self.lora is not None:
            raise ValueError(
                f"float8={self.float8} can't be combined with lora: adapters are trained beside weights in model.dtype; set float8=null"
            )
        if self.compile and self.lora is not None and self.lora.base is not None:
            raise ValueError(
                f"compile=true can't be combined with lora.base={self.lora.base}: 4-bit layers are not compiled; set compile=false"
            )

    def mesh_axes(self) -> dict[str, int]:
        """Return the size of each inner axis of the mesh, by name: only `cp`, along which each sequence is divided among ranks."""
        return {"cp": self.sequence_parallel_size}

    @property
    def host_states(self) -> bool:
        return self.cpu_offload

    def lighter(self) -> Iterable[Mapping[str, object]]:
        """Yield the settings that would save memory, the cheapest first: sharded gradients, recomputed layers, adapters, states in
        host memory.
        """
        if self.reduce_gradients == "once":
            yield {"reduce_gradients": "every_micro_batch"}
        if self.gradient_checkpointing not in (True, "auto"):
            yield {"gradient_checkpointing": True}
        lora = self.lora
        if lora is None:
            yield {"lora": {"rank": 32}}
            yield {"lora": {"rank": 32, "base": "nf4"}}
        elif lora.base is None:
            yield {"lora.base": "nf4"}
        if not self.cpu_offload:
            yield {"cpu_offload": True}

    def shards(self, ranks: int) -> int:
        """Return the number of ranks that share one copy of the weights: `shard_size`, or all ranks if unset.

        Raises:
            PlanError: `shard_size` does not divide the ranks.
        """
        size = self.shard_size or ranks
        if ranks % size:
            raise PlanError(
                f"shard_size={size} does not divide the {ranks} ranks of the engine",
                hint=f"use one of {', '.join(str(n) for n in range(1, ranks + 1) if not ranks % n)}",
            )
        return size
