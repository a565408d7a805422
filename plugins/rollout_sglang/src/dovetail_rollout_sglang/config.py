"""The config of the SGLang rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import attrs

from dovetail.sections import AT_LEAST_ONE
from dovetail_rollout_sglang.refusals import refuse_undrivable
from dovetail_rollout_sglang.versions import SGLANG
from dovetail_serving import AdaptedSection, DrivenEngine, spread_over_ranks


@attrs.frozen(kw_only=True)
class SglangRolloutConfig(AdaptedSection):
    """Generation with SGLang: one server started for every replica, or servers that already run."""

    driven: ClassVar[DrivenEngine | None] = SGLANG
    unsupported_keys: ClassVar[Mapping[str, str]] = {
        "mode": "SGLang's replicas are always servers: leave it out (set rollout.urls to use servers that run already)",
        "pipeline_parallel_size": "weight updates do not reach SGLang's pipeline stages; use tensor_parallel_size",
        "tp_size": "SGLang's tp_size is tensor_parallel_size here",
        "ep_size": "SGLang's ep_size is expert_parallel_size here",
        "mem_fraction_static": "SGLang's mem_fraction_static is gpu_memory_utilization here",
        "context_length": "SGLang's context_length is max_model_len here",
        "max_running_requests": "SGLang's max_running_requests is max_num_seqs here",
    }

    tensor_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Number of accelerators over which a replica divides every layer (SGLang's `tp_size`)."""
    expert_parallel_size: int = attrs.field(
        default=1, validator=[attrs.validators.ge(1), spread_over_ranks]
    )
    """Number of a replica's tensor-parallel accelerators over which experts are divided (SGLang's `ep_size`)."""
    gpu_memory_utilization: float = attrs.field(
        default=0.5, validator=[attrs.validators.gt(0), attrs.validators.le(1)]
    )
    """Share of the initially free memory for weights and KV cache (SGLang's `mem_fraction_static`); CUDA graphs and activations
    need memory beyond this share."""
    max_model_len: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Maximum length of prompt and response together, in tokens (SGLang's `context_length`); None for the model's maximum."""
    max_num_seqs: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Maximum number of samples that run at once (SGLang's `max_running_requests`); None leaves the choice to SGLang."""
    quantization: str | None = None
    """Method by which SGLang quantises the weights that it receives, such as `fp8`. Updates of quantised weights need
    a version of SGLang that can load new weights over quantised ones, such as 0.5.23."""
    adapter_modules: tuple[str, ...] = attrs.field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        validator=attrs.validators.min_len(1),
    )
    """Layers that may have adapters, by the last component of their names (SGLang's `lora_target_modules`). Used if
    `max_adapter_rank` is set: SGLang reserves memory for them at its start."""
    seeding: Literal["per_sample", "none"] = "none"
    """`per_sample` gives every sample its own seed, and turns on SGLang's deterministic inference, without which SGLang ignores
    seeds. Slower, and not available with every attention backend. `none` sets no seeds."""

    def __attrs_post_init__(self) -> None:
        refuse_undrivable(
            self.engine_args,
            ranks=self.tensor_parallel_size,
            adapters=self.max_adapter_rank is not None,
        )

    def attention_ranks(self) -> int:
        copies: int = self.engine_args.get("dp_size", 1)
        return self.tensor_parallel_size // copies

    def memory_share(self) -> tuple[str, float]:
        return "gpu_memory_utilization", self.gpu_memory_utilization

    def adapter_layers(self) -> tuple[str, ...]:
        return self.adapter_modules
