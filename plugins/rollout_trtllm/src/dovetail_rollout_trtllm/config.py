"""The config of the TensorRT-LLM rollout engine."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.config.fields import AT_LEAST_ONE
from dovetail.serving.section import ServingSection


@attrs.frozen(kw_only=True)
class TrtllmRolloutConfig(ServingSection):
    """Generation by TensorRT-LLM with its PyTorch backend: an engine for every replica in a process of its own, started by
    the run or by hand. Built against the engine's source; it has not run on the real engine.
    """

    mode: Literal["engine", "server"] = "engine"
    """`engine` starts an engine for every replica, which answers the run alone; `server` starts one that answers
    TensorRT-LLM's own OpenAI paths too, or joins those that `urls` names."""
    expert_parallel_size: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Accelerators, of those of a replica, over which it divides the experts of a layer; None leaves it to TensorRT-LLM."""
    kv_cache_memory: float = attrs.field(
        default=0.5, validator=[attrs.validators.gt(0), attrs.validators.lt(1)]
    )
    """Share for the KV cache of what is free on an accelerator once the weights are there (TensorRT-LLM's
    `free_gpu_memory_fraction`): unlike elsewhere, weights are not part of it."""
    max_num_tokens: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Most tokens of a step, prompts and samples together; None leaves it to TensorRT-LLM."""
    start_timeout: float = attrs.field(default=900.0, validator=attrs.validators.gt(0))
    """Seconds that an engine may take to start."""

    def attention_ranks(self) -> int:
        return 1 if self.engine_args.get("enable_attention_dp") else self.tensor_parallel_size
