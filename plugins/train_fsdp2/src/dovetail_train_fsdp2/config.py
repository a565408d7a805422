"""Config of the training engine. Nothing here imports torch."""

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
        "context_parallel_size": "fsdp2 has sequence_parallel_size for ranks that share each sequence",
        **dict.fromkeys(
            ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"),
            "fsdp2 shards parameters over all ranks, or shard_size of them; megatron has it",
        ),
    }

    gradient_checkpointing: Recompute = "auto"
    """Compute activations again in the backward pass instead of keeping them: in no layer (`false`), in every layer
    (`true`: least memory, a third more time), in every layer, but only what is cheap (`selective`: products and attention are kept), or in
    as few layers as the free memory of the accelerator allows (`auto`; on the CPU in none)."""
    memory_limit_gib: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Limit in GiB of what the process allocates on its accelerator, respected by `gradient_checkpointing: auto` and `keep_logits`; None:
    all that is free."""
    keep_logits: bool = False
    """Keep the logits of as many tokens as memory allows for the backward pass, in the compute dtype, instead of recomputing them: a few
    per cent faster for some GiB. On CUDA only; `memory_limit_gib` holds here too."""
    offload_activations: bool = False
    """Keep the inputs of recomputed layers in the host's memory: for long sequences in large models."""
    compile: bool = False
    """Compile the decoder layers with torch.compile: a fifth faster and leaner, after half a minute at the first update. It pays from
    about 50 updates on."""
    float8: Literal["rowwise"] | None = None
    """Multiply in float8 in the decoder layers, each row scaled by its own largest number (extra `float8`): less exact, meant for
    `compile` on H100s and newer and for wide layers; at 1.5B it is slower than bfloat16. None computes in `model.dtype`."""
    liger: bool = False
    """Use Liger's kernels for norms, rotary positions and gated layers (extra `liger`; CUDA only). `compile` does as much."""
    share_prompts: Share = "auto"
    """Compute a prompt once for all of its responses: where that saves work, always where the model allows, or never."""
    packing: Packing = "auto"
    """Put the samples of a micro-batch end to end, without padding: where that costs least, always where the architecture allows, or never.
    It needs `model.attn_implementation: sdpa`, which it replaces by kernels of its own."""
    freeze_vision: bool = False
    """Freeze the vision tower of a vision-language model, and the projector of its output."""
    shard_size: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Number of neighbouring ranks over which parameters, gradients and moments are sharded; each group of that many ranks holds a full
    copy. It divides the number of ranks; None shards over all of them."""
    reshard_after_forward: bool | None = None
    """Free the gathered parameters of a layer after its forward pass and gather them again for the backward pass: less memory, more
    communication. None: do so where they are sharded over several accelerators."""
    reduce_gradients: Reduce = "once"
    """Add up gradients over ranks once an update, which keeps a whole float32 gradient on every rank where there are
    several micro-batches; or after every micro-batch, which keeps only each rank's shard."""
    cpu_offload: bool = False
    """Keep shards, gradients and moments in the host's memory and step there; layers travel to the accelerator as they
    are needed. For models that fit in no other way: it is slow."""
    sequence_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Number of ranks that share each sequence (Ulysses, arXiv 2309.14509). It divides the number of ranks, and the model's
    attention heads divide by it. Samples are then always packed."""

    def __attrs_post_init__(self) -> None:
        """Refuse what was never tried together."""
        if self.float8 is not None and self.lora is not None:
            raise ValueError(
                f"float8={self.float8} with lora: adapters are trained beside weights in model.dtype; set float8=null"
            )
        if self.compile and self.lora is not None and self.lora.base is not None:
            raise ValueError(
                f"compile with lora.base={self.lora.base}: layers in 4 bits are not compiled; set compile=false"
            )

    def mesh_axes(self) -> dict[str, int]:
        """Return the size of the mesh's inner axis `cp`, along which ranks compute the same samples together."""
        return {"cp": self.sequence_parallel_size}

    @property
    def host_states(self) -> bool:
        return self.cpu_offload

    def lighter(self) -> Iterable[Mapping[str, object]]:
        """Return the settings that save memory, the cheapest first: sharded gradients, recomputed layers, adapters, optimizer states in
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
        """Return `shard_size`, or all ranks.

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
