"""The config of the TensorRT-LLM rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from dovetail.config.sections import RolloutSection

_COUNT = attrs.validators.optional(attrs.validators.ge(1))


def _joinable(section: Any, _: attrs.Attribute[Any], urls: tuple[str, ...]) -> None:
    """Refuse what is not the address of a server, and servers where none is asked for."""
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"rollout.urls: {url!r} is no address of a server, such as http://10.0.0.2:8000"
            )
    if urls and section.mode != "server":
        raise ValueError(
            f"rollout.urls joins servers, and rollout.mode is {section.mode!r}: set rollout.mode=server"
        )
    if len({url.rstrip("/") for url in urls}) < len(urls):
        raise ValueError("rollout.urls names a server twice: each is one replica")


def _served(section: Any, _: attrs.Attribute[Any], port: int | None) -> None:
    """Refuse a port where no server is started that others should find."""
    if port is not None and (section.mode != "server" or section.urls):
        why = "joins servers (rollout.urls)" if section.urls else f"has mode {section.mode!r}"
        raise ValueError(f"rollout.port={port} has no effect where the rollout {why}")


@attrs.frozen(kw_only=True)
class TrtllmRolloutConfig(RolloutSection):
    """Generation by TensorRT-LLM with its PyTorch backend: an engine for every replica in a process of its own, started by
    the run or by hand. Built against the engine's source; it has not run on the real engine.
    """

    mode: Literal["engine", "server"] = "engine"
    """`engine` starts an engine for every replica, which answers the run alone; `server` starts one that answers
    TensorRT-LLM's own OpenAI paths too, or joins those that `urls` names."""
    urls: tuple[str, ...] = attrs.field(default=(), validator=_joinable)
    """Servers that were started by hand with this plugin's command, such as `http://10.0.0.2:8000`: one a replica; mode
    must be `server`. They are asked with the token of the environment variable `DOVETAIL_TRTLLM_TOKEN`, where that is
    set, and never ended."""
    port: int | None = attrs.field(
        default=None,
        validator=[
            attrs.validators.optional([attrs.validators.ge(1024), attrs.validators.le(65535)]),
            _served,
        ],
    )
    """Mode `server`: replica k listens on this port of the loopback interface plus k; None takes free ones."""
    tensor_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Accelerators over which a replica divides every layer."""
    expert_parallel_size: int | None = attrs.field(default=None, validator=_COUNT)
    """Accelerators, of those of a replica, over which it divides the experts of a layer; None leaves it to TensorRT-LLM."""
    kv_cache_memory: float = attrs.field(
        default=0.5, validator=[attrs.validators.gt(0), attrs.validators.lt(1)]
    )
    """Share for the KV cache of what is free on an accelerator once the weights are there (TensorRT-LLM's
    `free_gpu_memory_fraction`): unlike elsewhere, weights are not part of it."""
    max_model_len: int | None = attrs.field(default=None, validator=_COUNT)
    """Longest prompt and response together, in tokens; None takes the model's positions."""
    max_num_seqs: int | None = attrs.field(default=None, validator=_COUNT)
    """Most samples that run at once; None leaves it to TensorRT-LLM."""
    max_num_tokens: int | None = attrs.field(default=None, validator=_COUNT)
    """Most tokens of a step, prompts and samples together; None leaves it to TensorRT-LLM."""
    enforce_eager: bool = False
    """Compute without CUDA graphs: slower, and started sooner."""
    prefix_caching: bool = True
    """Keep keys and values of prompts, so that the samples of a group compute theirs once."""
    kv_cache_dtype: str = "auto"
    """Dtype of the KV cache, such as `fp8`; `auto` takes the model's."""
    engine_args: Mapping[str, Any] = attrs.field(factory=dict)
    """Further arguments of TensorRT-LLM's `LLM`, by its names. Those that Dovetail sets itself win, and it says so."""
    start_timeout: float = attrs.field(default=900.0, validator=attrs.validators.gt(0))
    """Seconds that an engine may take to start."""

    @property
    def in_process(self) -> bool:
        return False

    @property
    def joined(self) -> int:
        return len(self.urls)

    def ranks_per_replica(self) -> int:
        return self.tensor_parallel_size
