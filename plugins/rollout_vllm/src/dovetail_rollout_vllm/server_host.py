"""ServerHost: handlers of a vLLM server's Dovetail routes; each takes a frame (a message) and returns a frame."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import attrs

from dovetail_rollout_vllm.engine_driver import EngineDriver
from dovetail_rollout_vllm.versions import VLLM
from dovetail_serving import PROTOCOL, Frame, Host, SampleCall, SampleResult, shape_of

_SAMPLE_SECONDS = 0.5
"""Seconds between two readings of vLLM's Prometheus gauges (running and waiting requests, use of the KV cache) during generation."""
_COUNTERS = {
    "vllm:generation_tokens": "new_tokens",
    "vllm:prefix_cache_queries": "prefix_queries",
    "vllm:prefix_cache_hits": "prefix_hits",
    "vllm:num_preemptions": "preemptions",
}
_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "cache_usage",
}
_FIRST_TOKEN = "vllm:time_to_first_token_seconds"  # noqa: S105 - the name of a histogram


@attrs.frozen(kw_only=True)
class Base:
    """The state of a server's base weights, that is, without adapters."""

    replaced: bool = False
    """Whether the weights differ from those on disk."""
    whole: bool = True
    """Whether the weights are complete; False after an aborted update, or after a sleep that freed the weights."""
    version: int | None = None
    """Version of the last update that replaced the weights; None before any update."""
    since: float | None = None
    """Unix time in seconds of the last change of the weights."""


class ServerHost(Host):
    """Handlers of requests to the engine of one vLLM server.

    Args:
        engine: vLLM's AsyncLLM.
        serving: the arguments with which the server was started.
    """

    def __init__(self, engine: Any, serving: Any) -> None:
        self._driver = EngineDriver(engine)
        self._config = engine.vllm_config
        self._serving = serving
        self._base = Base()
        self._busy_since: float | None = None
        self._busy_seconds = 0.0
        self._sampler: asyncio.Task[None] | None = None
        self._gauges = {f"{name}{of}": 0.0 for name in _GAUGES.values() for of in ("", "_max")}
        self._gauges["samples"] = 0.0

    async def generate(self, call: SampleCall) -> SampleResult:
        """Generate one sample, and count the time for metrics."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()
            self._sampler = asyncio.create_task(self._sample())
        try:
            return await self._driver.generate(call)
        finally:
            if not self._driver.running:
                self._rest()

    async def describe(self, _: Frame) -> Frame:
        """Return a description of the running engine: versions, the model's shape and the engine's settings."""
        model, parallel = self._config.model_config, self._config.parallel_config
        text, lora = model.hf_text_config, self._config.lora_config
        transfer = self._config.weight_transfer_config
        release = VLLM.installed()
        return Frame(
            header={
                "protocol": PROTOCOL,
                "vllm": None if release is None else release.version,
                "model": model.model,
                "architectures": list(model.hf_config.architectures or ()),
                "shape": shape_of(text),
                "dtype": str(model.dtype).removeprefix("torch."),
                "max_model_len": model.max_model_len,
                "logprobs_mode": getattr(model.logprobs_mode, "value", model.logprobs_mode),
                "quantization": model.quantization,
                "sleep": bool(model.enable_sleep_mode),
                "tokenizer": not model.skip_tokenizer_init,
                "ranks": parallel.world_size,
                "data_parallel": parallel.data_parallel_size,
                "api_servers": getattr(self._serving, "api_server_count", None) or 1,
                "weight_transfer": getattr(transfer, "backend", None),
                "worker_extension": parallel.worker_extension_cls,
                "adapter_rank": lora.max_lora_rank if lora is not None else None,
                "parts": await self._driver.parts(),
                "base": attrs.asdict(self._base),
            }
        )

    async def abort(self, frame: Frame) -> Frame:
        """Abort the requests whose ids are in `calls` of the frame's header."""
        await self._driver.abort(frame.header["calls"])
        return Frame(header={})

    async def score(self, frame: Frame) -> Frame:
        """Return a frame with the log-probabilities, float32 [L_i − 1] each, of the token sequences in the request frame's arrays."""
        scores = await self._driver.score([array.tolist() for array in frame.arrays])
        return Frame(header={}, arrays=tuple(scores))

    async def reset_cache(self, _: Frame) -> Frame:
        """Drop the engine's cached prefixes."""
        await self._driver.reset_cache()
        return Frame(header={})

    async def connect(self, frame: Frame) -> Frame:
        """Reset the engine for a new run, and make workers create receivers for the transport in `info` of the frame's header."""
        await self._driver.settle()
        return Frame(header=attrs.asdict(await self._driver.connect(frame.header["info"])))

    async def load(self, frame: Frame) -> Frame:
        """Receive and load the weight update that `manifest` in the frame's header describes; return its `Outcome` in a frame's header."""
        manifest = frame.header["manifest"]
        outcome = await self._driver.load(manifest)
        if manifest["kind"] != "adapter" and outcome.changed:
            self._base = Base(
                replaced=True,
                whole=outcome.error is None,
                version=manifest["version"],
                since=time.time(),
            )
        return Frame(header=attrs.asdict(outcome))

    async def freeze(self, _: Frame) -> Frame:
        """Pause all requests until `thaw`, and keep their KV cache."""
        await self._driver.freeze()
        return Frame(header={})

    async def thaw(self, _: Frame) -> Frame:
        """Continue the paused requests."""
        await self._driver.thaw()
        return Frame(header={})

    async def sleep(self, frame: Frame) -> Frame:
        """Free the accelerator memory of the tags (`weights`, `kv_cache`).

        Args:
            frame: the request. Its header has `tags`, and `keep_weights`: whether to keep a copy of the weights in host memory.

        Returns:
            A frame whose header has `freed`, the number of freed bytes.
        """
        tags = frozenset(frame.header["tags"])
        keep = frame.header["keep_weights"]
        freed = await self._driver.sleep(tags, keep_weights=keep)
        if "weights" in tags and not keep and self._config.model_config.enable_sleep_mode:
            self._base = attrs.evolve(self._base, replaced=True, whole=False, since=time.time())
        return Frame(header={"freed": freed})

    async def wake(self, frame: Frame) -> Frame:
        """Allocate the memory of the tags (`weights`, `kv_cache`) in `tags` of the frame's header again."""
        await self._driver.wake(frozenset(frame.header["tags"]))
        return Frame(header={})

    async def metrics(self, _: Frame) -> Frame:
        """Return a frame whose header has the engine's totals since the server's start, and maxima since the last call of this method.

        The caller subtracts the totals of an earlier call.
        """
        if self._driver.running:
            self._rest()
            self._busy_since = time.monotonic()
            self._sampler = asyncio.create_task(self._sample())
        totals = {**_counted(), **self._gauges, "busy_seconds": self._busy_seconds}
        self._gauges.update({f"{name}_max": 0.0 for name in _GAUGES.values()})
        return Frame(header=totals)

    def _rest(self) -> None:
        if self._busy_since is not None:
            self._busy_seconds += time.monotonic() - self._busy_since
            self._busy_since = None
        if self._sampler is not None:
            self._sampler.cancel()
            self._sampler = None

    async def _sample(self) -> None:
        """Add the values of vLLM's Prometheus gauges to the totals, every `_SAMPLE_SECONDS`, until the task is cancelled."""
        from vllm.v1.metrics.reader import Gauge, get_metrics_snapshot

        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            for metric in get_metrics_snapshot():
                name = _GAUGES.get(metric.name)
                if name is not None and isinstance(metric, Gauge):
                    self._gauges[name] += metric.value
                    highest = f"{name}_max"
                    self._gauges[highest] = max(self._gauges[highest], metric.value)
            self._gauges["samples"] += 1


def _counted() -> Mapping[str, float]:
    """Return the counts of vLLM's own metrics since the server started, summed over its engines."""
    from vllm.v1.metrics.reader import Counter, Histogram, get_metrics_snapshot

    totals = dict.fromkeys((*_COUNTERS.values(), "first_tokens", "first_token_seconds"), 0.0)
    for metric in get_metrics_snapshot():
        if isinstance(metric, Counter) and metric.name in _COUNTERS:
            totals[_COUNTERS[metric.name]] += metric.value
        elif isinstance(metric, Histogram) and metric.name == _FIRST_TOKEN:
            totals["first_tokens"] += metric.count
            totals["first_token_seconds"] += metric.sum
    return totals
