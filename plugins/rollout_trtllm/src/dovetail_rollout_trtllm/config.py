"""The config of the TensorRT-LLM rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from dovetail.errors import ConfigError
from dovetail.sections import AT_LEAST_ONE
from dovetail_serving import ServingSection, spread_over_ranks


@attrs.frozen(kw_only=True)
class TrtllmRolloutConfig(ServingSection):
    """Generation with `trtllm-serve`: the run starts one server for every replica, and restarts it for every weight update. Written
    from TensorRT-LLM's source; not run on the real engine yet.
    """

    unsupported_keys: ClassVar[Mapping[str, str]] = {
        "mode": "a TensorRT-LLM replica is always a server that the run starts: leave it out",
        "gpu_memory_utilization": "TensorRT-LLM's share counts only the memory that the weights leave: set kv_cache_memory",
        "free_gpu_memory_fraction": "TensorRT-LLM's free_gpu_memory_fraction is kv_cache_memory here",
    }

    executable: str = "trtllm-serve"
    """Program that starts a server: a path, or a name in this interpreter's directory or on the PATH. It may belong to another
    environment."""
    checkpoint_directory: str | None = None
    """Directory to which weight updates are written; it holds one copy of the model per replica, and two during an update. None
    means the run's directory. A directory in memory, such as one below `/dev/shm`, is faster."""
    expert_parallel_size: int | None = attrs.field(
        default=None, validator=[AT_LEAST_ONE, spread_over_ranks]
    )
    """Number of a replica's tensor-parallel accelerators over which experts are divided; None leaves the choice to TensorRT-LLM."""
    kv_cache_memory: float = attrs.field(
        default=0.5, validator=[attrs.validators.gt(0), attrs.validators.lt(1)]
    )
    """Fraction of the memory that is free on an accelerator after loading the weights; the KV cache takes this fraction (TensorRT-LLM's
    `free_gpu_memory_fraction`). Unlike in other engines, the fraction does not include the weights."""
    max_num_seqs: int = attrs.field(default=256, validator=attrs.validators.ge(1))
    """Maximum number of samples that run at once (TensorRT-LLM's `max_batch_size`); each sample has a connection to the server."""
    max_num_tokens: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Maximum number of tokens in one engine step, of prompts and responses together; None leaves the choice to TensorRT-LLM."""
    start_timeout: float = attrs.field(default=900.0, validator=attrs.validators.gt(0))
    """Time limit in seconds for the start of a server."""

    def __attrs_post_init__(self) -> None:
        if self.urls:
            raise ConfigError(
                "rollout.urls is set, but trtllm-serve can't receive weight updates while it runs",
                hint="leave rollout.urls out: the run starts a server for every replica, and restarts it for every update",
            )
        for name in ("pipeline_parallel_size", "context_parallel_size"):
            if self.engine_args.get(name, 1) != 1:
                raise ConfigError(
                    f"rollout.engine_args.{name} is {self.engine_args[name]}; expected 1: a replica has no accelerators for it",
                    hint="leave it out, and divide the model with rollout.tensor_parallel_size",
                )

    def attention_ranks(self) -> int:
        return 1 if self.engine_args.get("enable_attention_dp") else self.tensor_parallel_size
