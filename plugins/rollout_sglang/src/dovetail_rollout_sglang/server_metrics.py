"""Metrics: what a server of SGLang's did since it was last asked, as metrics that merge over replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.metrics import Max, Mean, Metric, Sum
from dovetail_serving import CounterDelta, Counters

PREFIX = "rollout/sglang/"


class SglangCounters(Counters):
    """Counts inside a server, from its start on."""

    def __init__(self) -> None:
        super().__init__("new_tokens", "prompt_tokens", "cached_tokens", "samples")

    def note(self, about: Mapping[str, Any], new_tokens: int) -> None:
        """Count a sample that has ended.

        Args:
            about: SGLang's `meta_info` of it.
            new_tokens: the new tokens of its response.
        """
        self.add(
            samples=1,
            new_tokens=new_tokens,
            prompt_tokens=about.get("prompt_tokens") or 0,
            cached_tokens=about.get("cached_tokens") or 0,
        )


def server_metrics() -> CounterDelta:
    """Return a converter from a server's totals to metrics; it returns none where nothing was generated."""
    return CounterDelta(PREFIX, "new_tokens", _metrics)


def _metrics(grown: Mapping[str, float], totals: Mapping[str, float]) -> Mapping[str, Metric]:
    return {
        "tokens_per_second": Mean(grown["new_tokens"], grown["busy_seconds"]),
        "new_tokens": Sum(grown["new_tokens"]),
        "prefix_cache_hits": Mean(grown["cached_tokens"], grown["prompt_tokens"]),
        "running_requests": Mean(grown["sample_seconds"], grown["busy_seconds"]),
        "running_requests_max": Max(totals["running_max"]),
    }
