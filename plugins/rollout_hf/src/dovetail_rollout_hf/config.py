"""The config of the transformers rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import attrs

from dovetail.sections import RolloutSection


@attrs.frozen(kw_only=True)
class HfRolloutConfig(RolloutSection):
    """Generation with a transformers model in the rollout's own process."""

    unsupported_keys: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (
                "enforce_eager",
                "engine_args",
                "expert_parallel_size",
                "gpu_memory_utilization",
                "kv_cache_dtype",
                "max_adapter_rank",
                "max_model_len",
                "mode",
                "pipeline_parallel_size",
                "port",
                "prefix_caching",
                "quantization",
                "seeding",
                "start_timeout",
                "tensor_parallel_size",
                "urls",
            ),
            "rollout hf generates in the trainer's process; only serving engines, such as rollout.name=vllm, have this key",
        ),
        "max_num_seqs": "what serving engines call max_num_seqs is max_batch_size here",
    }

    max_batch_size: int = attrs.field(default=256, validator=attrs.validators.ge(1))
    """Maximum number of sequences decoded at once; further requests wait until sequences end."""
    max_prefill_tokens: int = attrs.field(default=16384, validator=attrs.validators.ge(1))
    """Maximum number of prompt tokens in one prefill pass, padding included; a longer prompt gets a pass to itself."""
    decoder: Literal["auto", "fused", "transformers"] = "auto"
    """`fused` decodes the Llama family with fused kernels, and tests its logits against transformers at start-up. `transformers`
    runs any architecture. `auto` uses `fused` if the model is supported and the test passes."""

    def most_running(self) -> int | None:
        return self.max_batch_size
