"""Arguments of the stand-in's engine: those that are used, with the real defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal


class ExecutorMemoryType(StrEnum):
    """Kinds of memory that can be freed."""

    SAMPLER = "sampler"
    INIT_KV_CACHE = "_no_capture_init_kv_cache"
    MODEL_EXTRA = "model_extra"
    EXTRA_RESOURCES = "executor_extra"
    KV_CACHE = "kv_cache"
    MODEL_ENGINE_MAIN = "model"
    MODEL_WEIGHTS_MAIN = "model_weights"


@dataclass
class KvCacheConfig:
    """Of keys and values."""

    enable_block_reuse: bool = True
    free_gpu_memory_fraction: float | None = 0.9
    dtype: str = "auto"


@dataclass
class DecodeCudaGraphConfig:
    """Under its later name only."""

    batch_sizes: list[int] | None = None
    enable_padding: bool = False


@dataclass
class SleepConfig:
    """What becomes of memory that is freed."""

    restore_modes: dict[ExecutorMemoryType, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, mode in self.restore_modes.items():
            ExecutorMemoryType(kind)
            if mode not in ("NONE", "MEMSET", "CPU", "PINNED"):
                raise ValueError(f"{mode} is no restore mode")


@dataclass(kw_only=True)
class TorchLlmArgs:
    """Of the engine."""

    model: str | Path
    tokenizer: Any = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    moe_expert_parallel_size: int | None = None
    load_format: str = "auto"
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    max_batch_size: int | None = 2048
    max_input_len: int | None = 1024
    max_seq_len: int | None = None
    max_num_tokens: int | None = 8192
    backend: str | None = None
    cuda_graph_config: DecodeCudaGraphConfig | None = None
    sampler_type: str = "auto"
    orchestrator_type: Literal["rpc", "ray"] | None = None
    ray_worker_extension_cls: str | None = None
    sleep_config: SleepConfig | None = None
