"""The config of the vLLM rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

from dovetail_rollout_vllm.versions import LABELS_TOKENS, VLLM
from dovetail_serving import PORT, AdaptedSection, DrivenEngine


def _counted(section: Any, _: attrs.Attribute[Any], port: int | None) -> None:
    """Check that `metrics_port` is set only in mode `engine`: a server has its own address for metrics."""
    if port is not None and section.mode != "engine":
        raise ValueError(
            f"rollout.metrics_port={port} needs rollout.mode=engine; a server's metrics are at its own address, under "
            "/metrics"
        )


def _started(section: Any, _: attrs.Attribute[Any], runner: str) -> None:
    """Check that `model_runner` is not set for servers that the run joins."""
    if runner != "auto" and section.urls:
        raise ValueError(
            f"rollout.model_runner={runner} has no effect on running servers (rollout.urls): start them with the "
            f"environment variable VLLM_USE_V2_MODEL_RUNNER={int(runner == 'v2')}, and leave rollout.model_runner out"
        )


@attrs.frozen(kw_only=True)
class VllmRolloutConfig(AdaptedSection):
    """Generation with vLLM: one engine or one server for every replica, or servers that already run."""

    driven: ClassVar[DrivenEngine | None] = VLLM
    unsupported_keys: ClassVar[Mapping[str, str]] = {
        "expert_parallel_size": "vLLM spreads experts over all of its ranks: set engine_args={enable_expert_parallel: true}",
        "max_num_batched_tokens": "set vLLM's own arguments in engine_args: {max_num_batched_tokens: …}",
    }

    mode: Literal["engine", "server"] = "engine"
    """`engine` drives vLLM's asynchronous engine from the replica's process. `server` starts vLLM's HTTP server for every replica,
    or joins the servers in `urls`."""
    metrics_port: int | None = attrs.field(default=None, validator=[PORT, _counted])
    """In mode `engine`, replica k serves vLLM's Prometheus metrics under `/metrics` at this port plus k on the loopback interface.
    None turns these metrics off; the run's own metrics remain. A process can serve only one replica's metrics, so with several
    replicas each needs its own process, as under runtime `ray`. In mode `server` every server serves its metrics at its address."""
    pipeline_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Number of pipeline stages into which a replica divides the layers."""
    gpu_memory_utilization: float = attrs.field(
        default=0.5, validator=[attrs.validators.gt(0), attrs.validators.le(1)]
    )
    """Maximum share of each accelerator's memory for weights and KV cache together. If the samples of a step need less, the cache
    is only as large as they need. `engine_args: {kv_cache_memory_bytes: …}` sets the size of the cache."""
    model_runner: Literal["auto", "v1", "v2"] = attrs.field(default="auto", validator=_started)
    """Which of vLLM's model runners to use. `auto` is v2 for models with which v2 passed this plugin's tests (vLLM 0.24: Qwen2 on
    one accelerator), else vLLM's choice. The environment variable VLLM_USE_V2_MODEL_RUNNER overrides `auto`."""
    quantization: str | None = None
    """Method by which vLLM quantises the weights that it receives, such as `fp8`."""
    seeding: Literal["per_sample", "none"] = "none"
    """`per_sample` gives every sample its own seed, so that the same batch yields the same samples again. Slower: vLLM then draws
    the samples' tokens one by one. `none` sets no seeds."""
    start_timeout: float = attrs.field(default=600.0, validator=attrs.validators.gt(0))
    """Time limit in seconds for the start of an engine or server, without the time in which it waits for training models to load."""

    @property
    def starts_beside(self) -> bool:
        return True

    @property
    def imports(self) -> tuple[str, ...]:
        return ("vllm.v1.engine.async_llm",) if self.mode == "engine" else ()

    def cache_problem(self) -> str | None:
        if self.urls:
            return None  # their versions are checked when they are joined
        release = VLLM.installed()
        if release is not None and release.number < LABELS_TOKENS:
            return f"can keep the KV cache over an update only from vLLM {LABELS_TOKENS} on (installed: {release.version})"
        return None

    def memory_share(self) -> tuple[str, float]:
        return "gpu_memory_utilization", self.gpu_memory_utilization

    @property
    def bounds_cache(self) -> bool:
        return "kv_cache_memory_bytes" not in self.engine_args

    def ranks_per_replica(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size
