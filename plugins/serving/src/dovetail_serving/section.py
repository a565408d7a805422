"""ServingSection and AdaptedSection: base classes of the configs of rollouts on serving engines. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import attrs

from dovetail.errors import ConfigError
from dovetail.sections import AT_LEAST_ONE, PlannedAdapter, RolloutSection
from dovetail_serving.adapter_check import unapplied
from dovetail_serving.division import divisors
from dovetail_serving.releases import DrivenEngine


def _joinable(section: object, _: attrs.Attribute[Any], urls: tuple[str, ...]) -> None:
    """Refuse URLs that are not HTTP addresses or occur twice, and any URLs in a mode without servers."""
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"rollout.urls: {url!r} is not a server's address; expected one such as http://10.0.0.2:8000"
            )
    mode = getattr(section, "mode", "server")
    if urls and mode != "server":
        raise ValueError(
            f"rollout.urls can't be combined with rollout.mode={mode}: set rollout.mode=server to join servers"
        )
    if len({url.rstrip("/") for url in urls}) < len(urls):
        raise ValueError(
            f"rollout.urls names a server twice: {', '.join(urls)}; expected each server once, since each URL is one replica"
        )


def _served(section: Any, _: attrs.Attribute[Any], port: int | None) -> None:
    """Refuse a port if the run starts no server to listen on it."""
    mode = getattr(section, "mode", "server")
    if port is not None and (mode != "server" or section.urls):
        why = "joins servers (rollout.urls)" if section.urls else f"has mode {mode!r}"
        raise ValueError(
            f"rollout.port={port} applies only to servers that the run starts, but this rollout {why}: leave rollout.port out"
        )


def spread_over_ranks(section: Any, _: attrs.Attribute[Any], size: int | None) -> None:
    """Check that `expert_parallel_size` divides `tensor_parallel_size`, over whose ranks experts are spread."""
    ranks = section.tensor_parallel_size
    if size is not None and ranks % size:
        raise ValueError(
            f"rollout.expert_parallel_size={size} does not divide rollout.tensor_parallel_size={ranks}, over whose ranks "
            f"experts are spread: set it to one of {divisors(ranks)}"
        )


PORT = attrs.validators.optional([attrs.validators.ge(1024), attrs.validators.le(65535)])
"""Validator for an unprivileged port (1024–65535) or None."""


@attrs.frozen(kw_only=True)
class ServingSection(RolloutSection):
    """Base of the configs of engines in separate processes.

    If a subclass has the field `mode`, servers are started and joined only in mode `server`.
    """

    driven: ClassVar[DrivenEngine | None] = None
    """The engine's package, if its release is checked; else None."""

    urls: tuple[str, ...] = attrs.field(default=(), validator=_joinable)
    """Servers that were started by hand, such as `http://10.0.0.2:8000`, one per replica; the option `mode`, if any, must be `server`. The
    run never ends these servers. The token for servers that require one is the value of the environment variable `DOVETAIL_<NAME>_TOKEN`,
    with the rollout's name in capitals.
    """
    port: int | None = attrs.field(default=None, validator=[PORT, _served])
    """Port of replica 0's server on the loopback interface; replica k's server listens on this port plus k. None takes free ports."""
    tensor_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Number of accelerators over which a replica divides every layer."""
    max_model_len: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Maximum length of prompt and response together, in tokens; None takes the model's maximum."""
    max_num_seqs: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Maximum number of samples that one replica generates at once; None takes the engine's default."""
    enforce_eager: bool = False
    """Compute without CUDA graphs and compilation, which is slower but starts sooner."""
    prefix_caching: bool = True
    """Cache keys and values of prompts, so that a group computes those of its prompt only once."""
    kv_cache_dtype: str = "auto"
    """Dtype of the KV cache, such as `fp8`; `auto` takes the model's dtype."""
    engine_args: Mapping[str, Any] = attrs.field(factory=dict)
    """Further arguments of the engine, by the engine's names. Arguments that Dovetail sets take precedence, with a warning."""
    start_timeout: float = attrs.field(default=600.0, validator=attrs.validators.gt(0))
    """Seconds that an engine or a server may take to start."""

    @property
    def in_process(self) -> bool:
        return False

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.urls

    def joining(self, address: str) -> Self:
        mode: dict[str, Any] = {"mode": "server"} if hasattr(self, "mode") else {}
        try:
            return attrs.evolve(self, urls=(address,), port=None, replicas=None, **mode)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(str(error)) from error

    def ranks_per_replica(self) -> int:
        return self.tensor_parallel_size

    def most_running(self) -> int | None:
        return self.max_num_seqs

    def attention_ranks(self) -> int:
        """Return the number of ranks over which attention heads are divided; a replica's further ranks process other samples."""
        return self.tensor_parallel_size


@attrs.frozen(kw_only=True)
class AdaptedSection(ServingSection):
    """Base of the configs of engines that apply low-rank adapters and reserve memory for adapters at their start."""

    max_adapter_rank: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Largest rank of a low-rank adapter that updates may send instead of whole weights (actor.engine.lora.sync: adapter). None reserves no
    memory for adapters, which is faster.
    """

    def adapter_problem(self, rank: int | None) -> str | None:
        room = self.max_adapter_rank
        if room is None:
            return f"has no room for adapters: set rollout.max_adapter_rank={rank or 'RANK'}"
        if rank is not None and rank > room:
            return f"has room only for ranks up to {room}, but the adapter has rank {rank}: set rollout.max_adapter_rank={rank}"
        return None

    def adapter_layers(self) -> tuple[str, ...] | None:
        """Return the layers that can have adapters, by the last part of their names; None for every linear layer."""
        return None

    def unfit_adapter(self, adapter: PlannedAdapter) -> str | None:
        return unapplied(
            adapter.dora, adapter.target_modules, self.adapter_layers()
        ) or super().unfit_adapter(adapter)
