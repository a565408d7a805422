"""Metrics of an SGLang server since the last query, to be merged over replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.metrics import Max, Mean, Metric, Sum
from dovetail_serving import CounterDelta, Counters

PREFIX = "rollout/sglang/"


class SglangCounters(Counters):
    """Counts samples and tokens in an SGLang server since its start."""

    def __init__(self) -> None:
        super().__init__("new_tokens", "prompt_tokens", "cached_tokens", "samples")

    def note(self, about: Mapping[str, Any], new_tokens: int) -> None:
        """Count a sample that has ended.

        Args:
            about: SGLang's `meta_info` of the sample.
            new_tokens: the number of generated tokens.
        """
        self.add(
            samples=1,
            new_tokens=new_tokens,
            prompt_tokens=about.get("prompt_tokens") or 0,
            cached_tokens=about.get("cached_tokens") or 0,
        )


def server_metrics() -> CounterDelta:
    """Return a converter from a server's totals to metrics; the metrics are empty if no token was generated."""
    return CounterDelta(PREFIX, "new_tokens", _metrics)


def _metrics(grown: Mapping[str, float], totals: Mapping[str, float]) -> Mapping[str, Metric]:
    return {
        "tokens_per_second": Mean(grown["new_tokens"], grown["busy_seconds"]),
        "new_tokens": Sum(grown["new_tokens"]),
        "prefix_cache_hits": Mean(grown["cached_tokens"], grown["prompt_tokens"]),
        "running_requests": Mean(grown["sample_seconds"], grown["busy_seconds"]),
        "running_requests_max": Max(totals["running_max"]),
    }
