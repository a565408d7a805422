"""Config of the training engine. Nothing here imports torch or Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

from dovetail.errors import ConfigError, PlanError
from dovetail.sections import AT_LEAST_ONE
from dovetail_torch_engines import AdaptableSection, LoraSection

Layers = Literal["auto", "local", "transformer_engine"]
Recompute = bool | Literal["selective"]


def _can_adapt(instance: Any, _: Any, value: LoraSection | None) -> None:
    if value is not None and instance.layers == "transformer_engine":
        raise ConfigError(
            "lora supports only Megatron's plain modules, not layers=transformer_engine: use layers=auto or layers=local"
        )
    if value is not None and value.base is not None:
        raise ConfigError(
            f"megatron does not support quantised weights, and lora.base={value.base} quantises to 4 bits",
            hint="leave lora.base out, or use engine fsdp2",
        )


@attrs.frozen(kw_only=True)
class MegatronConfig(AdaptableSection):
    """Config of the engine on Megatron-Core: tensor, pipeline, context and expert parallelism, with Megatron's distributed optimizer."""

    unsupported_keys: ClassVar[Mapping[str, str]] = {
        "sequence_parallel_size": "megatron has context_parallel_size for ranks that share each sequence",
        "shard_size": "megatron divides parameters by tensor_parallel_size and pipeline_parallel_size",
    }

    tensor_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Number of ranks over which every weight matrix is divided (axis `tp`). It divides the model's query heads and its key and value
    heads."""
    pipeline_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Number of stages over which the layers are divided (axis `pp`), at most the number of layers."""
    last_stage_layers: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Number of layers in the last stage, which also has the output layer; the other stages share the rest evenly. None: the number with
    which all stages take about the same time. It has no effect without pipeline parallelism."""
    context_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Number of ranks that share each pack of sequences (axis `cp`), divided by heads in attention and by tokens elsewhere (Ulysses,
    arXiv 2309.14509). With `tensor_parallel_size` it divides the query heads."""
    expert_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Number of ranks over which the experts of a mixture are divided. They are data-parallel ranks, whose number it divides.
    With several stages it must be 1."""
    sequence_parallel: bool = True
    """Divide activations between tensor-parallel regions by tokens (arXiv 2205.05198): less memory for the same
    communication. It has no effect without tensor parallelism."""
    layers: Layers = "auto"
    """Implementation of the layers: plain modules of Megatron-Core (`local`), Transformer Engine's fused ones
    (`transformer_engine`), or Transformer Engine where it is installed (`auto`)."""
    gradient_checkpointing: Recompute = False
    """Compute activations again in the backward pass: all of a layer's (`true`), attention's alone (`selective`), or none."""
    fused_activations: bool = False
    """Compile the gated activation and the residual addition to one kernel each."""
    overlap_gradients: bool = False
    """Reduce the gradients of some layers over data-parallel ranks while those of other layers are still computed."""
    lora: LoraSection | None = attrs.field(default=None, validator=_can_adapt)
    """Train low-rank adapters on the linear layers of attention and dense inner networks, and freeze everything else, which
    then is the reference policy too; None trains all. `layers: auto` means `local` then."""
    logits_chunk: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Number of tokens whose logits exist at once; None: as many as fill 1 GiB in float32."""

    def mesh_axes(self) -> dict[str, int]:
        """Return the sizes of the mesh's inner axes, `pp` outermost and `tp` innermost, so that a tensor-parallel group's ranks are
        neighbours.
        """
        return {
            "pp": self.pipeline_parallel_size,
            "cp": self.context_parallel_size,
            "tp": self.tensor_parallel_size,
        }

    def shards(self, ranks: int) -> int:
        """Return the number of ranks over which a parameter is divided: tensor-parallel ranks times stages; optimizer states are further
        divided over data-parallel ranks.

        Raises:
            PlanError: the layout does not divide the ranks.
        """
        inner = self.pipeline_parallel_size * self.context_parallel_size * self.tensor_parallel_size
        if ranks % inner:
            raise PlanError(
                f"{ranks} ranks can't be divided into groups of {inner} (tensor × pipeline × context parallel)",
                hint=f"use a multiple of {inner} ranks, or smaller sizes",
            )
        replicas = ranks // inner * self.context_parallel_size
        if replicas % self.expert_parallel_size:
            raise PlanError(
                f"expert_parallel_size={self.expert_parallel_size} does not divide {replicas}, the number of ranks that experts are spread over (data × context parallel)",
                hint=f"use one of {', '.join(str(n) for n in range(1, replicas + 1) if not replicas % n)}",
            )
        if self.expert_parallel_size > 1 and self.pipeline_parallel_size > 1:
            raise PlanError(
                f"expert_parallel_size={self.expert_parallel_size} with pipeline_parallel_size="
                f"{self.pipeline_parallel_size} is not possible here",
                hint="use one of them, with tensor or context parallelism",
            )
        return self.pipeline_parallel_size * self.tensor_parallel_size
