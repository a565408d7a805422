"""The config of the TensorRT-LLM rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import attrs

from dovetail.errors import ConfigError
from dovetail.sections import AT_LEAST_ONE
from dovetail.serving import ServingSection, spread_over_ranks

_FURTHER = ("pipeline_parallel_size", "context_parallel_size")
"""Arguments of TensorRT-LLM that would take more accelerators than the run gives to a replica."""


@attrs.frozen(kw_only=True)
class TrtllmRolloutConfig(ServingSection):
    """Generation by TensorRT-LLM with its PyTorch backend: an engine for every replica in a process of its own, started by
    the run or by hand. Built against the engine's source; it has not run on the real engine.
    """

    lacks: ClassVar[Mapping[str, str]] = {
        "gpu_memory_utilization": "TensorRT-LLM takes a share of what the weights leave: kv_cache_memory",
        "free_gpu_memory_fraction": "TensorRT-LLM's free_gpu_memory_fraction is kv_cache_memory here",
    }

    mode: Literal["engine", "server"] = "engine"
    """`engine` starts an engine for every replica, which answers the run alone; `server` starts one that answers
    TensorRT-LLM's own OpenAI paths too, or joins those that `urls` names."""
    expert_parallel_size: int | None = attrs.field(
        default=None, validator=[AT_LEAST_ONE, spread_over_ranks]
    )
    """Accelerators, of those of `tensor_parallel_size`, over which it divides the experts of a layer; None leaves it to TensorRT-LLM."""
    kv_cache_memory: float = attrs.field(
        default=0.5, validator=[attrs.validators.gt(0), attrs.validators.lt(1)]
    )
    """Share for the KV cache of what is free on an accelerator once the weights are there (TensorRT-LLM's
    `free_gpu_memory_fraction`): unlike elsewhere, weights are not part of it."""
    max_num_tokens: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Most tokens of a step, prompts and samples together; None leaves it to TensorRT-LLM."""
    start_timeout: float = attrs.field(default=900.0, validator=attrs.validators.gt(0))
    """Seconds that an engine may take to start."""

    def __attrs_post_init__(self) -> None:
        ranks = self.tensor_parallel_size
        for name in _FURTHER:
            if self.engine_args.get(name, 1) != 1:
                raise ConfigError(
                    f"rollout.engine_args.{name}={self.engine_args[name]}: a replica has {ranks} "
                    f"accelerator{'' if ranks == 1 else 's'} (rollout.tensor_parallel_size), and its updates reach no further: "
                    "leave it out, and divide the model by rollout.tensor_parallel_size"
                )

    def attention_ranks(self) -> int:
        return 1 if self.engine_args.get("enable_attention_dp") else self.tensor_parallel_size
