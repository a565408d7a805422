"""The config of the SGLang rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from dovetail.config.sections import RolloutSection

_AT_LEAST_ONE = attrs.validators.optional(attrs.validators.ge(1))


def _joinable(_: Any, __: attrs.Attribute[Any], urls: tuple[str, ...]) -> None:
    """Refuse what is not the address of a server."""
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"rollout.urls: {url!r} is no address of a server, such as http://10.0.0.2:30000"
            )
    if len({url.rstrip("/") for url in urls}) < len(urls):
        raise ValueError("rollout.urls names a server twice: each is one replica")


def _served(section: Any, _: attrs.Attribute[Any], port: int | None) -> None:
    """Refuse a port where no server is started that could listen on it."""
    if port is not None and section.urls:
        raise ValueError(
            f"rollout.port={port} is for servers that the run starts, and this rollout joins servers (rollout.urls): "
            "leave it out"
        )


def _divisible(section: Any, _: attrs.Attribute[Any], size: int) -> None:
    """Refuse expert groups that do not fit into the tensor-parallel ranks."""
    if section.tensor_parallel_size % size:
        raise ValueError(
            f"rollout.expert_parallel_size={size} does not divide rollout.tensor_parallel_size="
            f"{section.tensor_parallel_size}: experts are spread over those ranks"
        )


@attrs.frozen(kw_only=True)
class SglangRolloutConfig(RolloutSection):
    """Generation by SGLang: a server for every replica, or servers that are there."""

    urls: tuple[str, ...] = attrs.field(default=(), validator=_joinable)
    """Servers that were started by hand with `python -m dovetail_rollout_sglang.serve`, such as `http://10.0.0.2:30000`: one a
    replica. They are asked with the token of the environment variable `DOVETAIL_SGLANG_TOKEN`, where that is set, and
    never ended. None starts a server for every replica."""
    port: int | None = attrs.field(
        default=None,
        validator=[
            attrs.validators.optional([attrs.validators.ge(1024), attrs.validators.le(65535)]),
            _served,
        ],
    )
    """Replica k listens on this port of the loopback interface plus k; None takes free ones."""
    tensor_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Accelerators over which a replica divides every layer (SGLang's `tp_size`)."""
    expert_parallel_size: int = attrs.field(
        default=1, validator=[attrs.validators.ge(1), _divisible]
    )
    """Accelerators, of those of `tensor_parallel_size`, over which experts are spread (SGLang's `ep_size`)."""
    gpu_memory_utilization: float = attrs.field(
        default=0.5, validator=[attrs.validators.gt(0), attrs.validators.le(1)]
    )
    """Share of the memory free at the start that weights and KV cache take (SGLang's `mem_fraction_static`); CUDA graphs and
    activations come on top."""
    max_model_len: int | None = attrs.field(default=None, validator=_AT_LEAST_ONE)
    """Longest prompt and response together, in tokens (SGLang's `context_length`); None leaves it to the model."""
    max_num_seqs: int | None = attrs.field(default=None, validator=_AT_LEAST_ONE)
    """Most samples that run at once (SGLang's `max_running_requests`); None leaves it to SGLang."""
    enforce_eager: bool = False
    """Compute without CUDA graphs: slower, and started sooner."""
    prefix_caching: bool = True
    """Keep keys and values of prompts in the radix cache, so that the samples of a group compute theirs once."""
    quantization: str | None = None
    """How SGLang quantises the weights that arrive, such as `fp8`; updates of quantised weights need a version with
    begin_weight_update (0.5.23 was tried)."""
    kv_cache_dtype: str = "auto"
    """Dtype of the KV cache, such as `fp8_e5m2`; `auto` takes the model's."""
    seeding: Literal["per_sample", "none"] = "none"
    """`per_sample` gives every sample a seed of its own from its random stream, and SGLang its deterministic inference, without
    which it heeds no seeds: slower, and not with every attention backend."""
    engine_args: Mapping[str, Any] = attrs.field(factory=dict)
    """Further arguments of SGLang's server, by the names of its `ServerArgs`. Those that Dovetail sets itself win, and it
    says so."""
    start_timeout: float = attrs.field(default=600.0, validator=attrs.validators.gt(0))
    """Seconds that a server may take to start."""

    @property
    def in_process(self) -> bool:
        return False

    @property
    def joined(self) -> int:
        return len(self.urls)

    def ranks_per_replica(self) -> int:
        return self.tensor_parallel_size
