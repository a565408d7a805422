"""The config of the vLLM rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from dovetail.config.sections import RolloutSection


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
    """Refuse a port where no server is started that could listen on it."""
    if port is not None and (section.mode != "server" or section.urls):
        why = "joins servers (rollout.urls)" if section.urls else f"has mode {section.mode!r}"
        raise ValueError(
            f"rollout.port={port} is for servers that the run starts, and this rollout {why}: leave it out"
        )


@attrs.frozen(kw_only=True)
class VllmRolloutConfig(RolloutSection):
    """Generation by vLLM: an engine of its own for every replica, a server for every replica, or servers that are there."""

    mode: Literal["engine", "server"] = "engine"
    """`engine` drives vLLM's asynchronous engine from the replica's process; `server` starts vLLM's HTTP server for every
    replica, or joins those that `urls` names."""
    urls: tuple[str, ...] = attrs.field(default=(), validator=_joinable)
    """Servers that were started by hand, such as `http://10.0.0.2:8000`: one a replica; mode must be `server`. They
    are asked with the token of the environment variable `DOVETAIL_VLLM_TOKEN`, where that is set, and never ended."""
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
    pipeline_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Accelerators over which a replica divides the layers into stages."""
    gpu_memory_utilization: float = attrs.field(
        default=0.5, validator=[attrs.validators.gt(0), attrs.validators.le(1)]
    )
    """Share of each accelerator's memory that the engine takes, weights and KV cache together."""
    max_model_len: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Longest prompt and response together, in tokens; None leaves it to the model."""
    max_num_seqs: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Most samples that run at once; None leaves it to vLLM (1,024 on accelerators with 70 GiB and more)."""
    enforce_eager: bool = False
    """Compute without CUDA graphs and compilation: slower, and started sooner."""
    prefix_caching: bool = True
    """Keep keys and values of prompts, so that the samples of a group compute theirs once."""
    quantization: str | None = None
    """How vLLM quantises the weights that arrive, such as `fp8`."""
    kv_cache_dtype: str = "auto"
    """Dtype of the KV cache, such as `fp8`; `auto` takes the model's."""
    max_adapter_rank: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Largest rank of a low-rank adapter that may arrive in place of whole weights (actor.engine.lora.sync: adapter);
    None makes no room for one, which is faster."""
    seeding: Literal["per_sample", "none"] = "none"
    """`per_sample` gives every sample a seed of its own from its random stream: a sample is then the same whenever it is
    drawn on the same batch, at the price of a sampler that goes through them one by one."""
    engine_args: Mapping[str, Any] = attrs.field(factory=dict)
    """Further arguments of vLLM's engine, by its names. Those that Dovetail sets itself win, and it says so."""
    start_timeout: float = attrs.field(default=600.0, validator=attrs.validators.gt(0))
    """Seconds that an engine or a server may take to start; a wait for training models that load meanwhile is not counted."""

    @property
    def in_process(self) -> bool:
        return False

    @property
    def starts_beside(self) -> bool:
        return True

    @property
    def imports(self) -> tuple[str, ...]:
        return ("vllm.v1.engine.async_llm",) if self.mode == "engine" else ()

    @property
    def joined(self) -> int:
        return len(self.urls)

    def ranks_per_replica(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def adapter_problem(self, rank: int | None) -> str | None:
        room = self.max_adapter_rank
        if room is None:
            return f"has no room for one: set rollout.max_adapter_rank={rank or 'its rank'}"
        if rank is not None and rank > room:
            return f"has room for rank {room}, and the adapter has {rank}: set rollout.max_adapter_rank={rank}"
        return None
