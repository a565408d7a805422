"""Config of the training engine. This module imports neither torch nor Megatron."""

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
            "lora can't be combined with layers=transformer_engine; expected layers=auto or layers=local"
        )
    if value is not None and value.base is not None:
        raise ConfigError(
            f"lora.base={value.base} can't be used: the engine megatron does not support quantised weights",
            hint="leave lora.base out, or use the engine fsdp2",
        )


@attrs.frozen(kw_only=True)
class MegatronConfig(AdaptableSection):
    """Config of the engine on Megatron-Core: tensor, pipeline, context and expert parallelism, with Megatron's distributed optimizer."""

    unsupported_keys: ClassVar[Mapping[str, str]] = {
        "sequence_parallel_size": "with megatron, set context_parallel_size: the number of ranks that share each sequence",
        "shard_size": "with megatron, set tensor_parallel_size and pipeline_parallel_size to divide parameters",
    }

    tensor_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Number of ranks over which every weight matrix is divided (axis `tp`). It must divide the numbers of query heads and of key
    and value heads."""
    pipeline_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Number of stages over which the layers are divided (axis `pp`), at most the number of layers."""
    last_stage_layers: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Number of layers in the last stage, which also has the output layer; the other stages divide the remaining layers evenly.
    None: the number with which all stages take about the same time. Without pipeline parallelism this has no effect."""
    context_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Number of ranks that share each pack of sequences (axis `cp`): attention is divided by heads, all other layers by tokens
    (Ulysses, arXiv 2309.14509). Its product with `tensor_parallel_size` must divide the number of query heads."""
    expert_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Number of ranks over which the experts of a mixture-of-experts model are divided. It must divide the number of experts, and the
    number of data-parallel ranks times `context_parallel_size`. It must be 1 if there are several pipeline stages."""
    sequence_parallel: bool = True
    """Divide by tokens the activations that tensor-parallel ranks would otherwise all hold, such as the inputs of norms (arXiv
    2205.05198): less memory for the same communication. Without tensor parallelism this has no effect."""
    layers: Layers = "auto"
    """Implementation of the layers: `local`, plain modules of Megatron-Core; `transformer_engine`, Transformer Engine's fused
    modules; `auto`, Transformer Engine if installed, else `local`."""
    gradient_checkpointing: Recompute = False
    """Activations to recompute in the backward pass: all of a layer's (`true`), only attention's (`selective`), or none (`false`)."""
    fused_activations: bool = False
    """Compile the gated activation and the residual addition to one kernel each."""
    overlap_gradients: bool = False
    """Reduce the gradients of finished layers over data-parallel ranks while other layers' gradients are still computed."""
    lora: LoraSection | None = attrs.field(default=None, validator=_can_adapt)
    """Train low-rank adapters on the linear layers of attention and dense MLPs, and freeze all other weights. The model without its
    adapters is also the reference policy. `layers: auto` then means `local`. None trains all weights."""
    logits_chunk: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Number of tokens whose logits are computed at once; None: as many as fill 1 GiB in float32."""

    def mesh_axes(self) -> dict[str, int]:
        """Return the sizes of the mesh's inner axes in order, `tp` last, so that tensor-parallel ranks are neighbours."""
        return {
            "pp": self.pipeline_parallel_size,
            "cp": self.context_parallel_size,
            "tp": self.tensor_parallel_size,
        }

    def shards(self, ranks: int) -> int:
        """Return the number of ranks that together hold one copy of the model: tensor-parallel ranks times pipeline stages.

        Optimizer states are also divided over data-parallel ranks.

        Args:
            ranks: the number of ranks of the engine.

        Raises:
            PlanError: the layout does not divide the ranks, or combines expert parallelism with several pipeline stages.
        """
        inner = self.pipeline_parallel_size * self.context_parallel_size * self.tensor_parallel_size
        if ranks % inner:
            raise PlanError(
                f"{ranks} ranks can't be divided into groups of {inner} (tensor × pipeline × context parallel)",
                hint=f"use a multiple of {inner} ranks, or smaller parallel sizes",
            )
        replicas = ranks // inner * self.context_parallel_size
        if replicas % self.expert_parallel_size:
            raise PlanError(
                f"expert_parallel_size={self.expert_parallel_size} does not divide the {replicas} ranks over which experts are spread (data × context parallel)",
                hint=f"use one of {', '.join(str(n) for n in range(1, replicas + 1) if not replicas % n)}",
            )
        if self.expert_parallel_size > 1 and self.pipeline_parallel_size > 1:
            raise PlanError(
                f"expert_parallel_size={self.expert_parallel_size} can't be combined with pipeline_parallel_size="
                f"{self.pipeline_parallel_size}",
                hint="set one of the two to 1; use tensor or context parallelism instead",
            )
        return self.pipeline_parallel_size * self.tensor_parallel_size
