"""Metrics of a vLLM server since the last query, to be merged over replicas."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.metrics import Max, Mean, Metric, Sum
from dovetail_rollout_vllm.engine_metrics import PREFIX
from dovetail_serving import CounterDelta


def server_metrics() -> CounterDelta:
    """Return a converter from a server's totals to the metrics that `EngineMetrics.take` returns."""
    return CounterDelta(PREFIX, "new_tokens", _metrics)


def _metrics(grown: Mapping[str, float], totals: Mapping[str, float]) -> Mapping[str, Metric]:
    looks = grown["samples"]
    found: dict[str, Metric] = {
        "tokens_per_second": Mean(grown["new_tokens"], grown["busy_seconds"]),
        "new_tokens": Sum(grown["new_tokens"]),
        "prefix_cache_hits": Mean(grown["prefix_hits"], grown["prefix_queries"]),
        "preemptions": Sum(grown["preemptions"]),
        "time_to_first_token": Mean(grown["first_token_seconds"], grown["first_tokens"]),
    }
    for name, ours in (
        ("running", "running_requests"),
        ("waiting", "waiting_requests"),
        ("cache_usage", "kv_cache_usage"),
    ):
        # A rollout may end before the gauges are first read.
        if looks:
            found[ours] = Mean(grown[name], looks)
            found[f"{ours}_max"] = Max(totals[f"{name}_max"])
    return found
