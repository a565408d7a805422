"""Figures of a TensorRT-LLM server: what it did since it was last asked, as metrics that merge over replicas."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.metrics import Max, Mean, Metric, Sum
from dovetail.serving import Growth

PREFIX = "rollout/trtllm/"


def figures() -> Growth:
    """What makes of a server's totals the metrics.

    They are `tokens_per_second` and `new_tokens`, aborted samples' tokens among them; `running_requests`, on average over the
    time in which any ran, and at most; `aborted_samples`. There are none where nothing was generated.
    """
    return Growth(PREFIX, "samples", _metrics)


def _metrics(grown: Mapping[str, float], totals: Mapping[str, float]) -> Mapping[str, Metric]:
    return {
        "tokens_per_second": Mean(grown["new_tokens"], grown["busy_seconds"]),
        "new_tokens": Sum(grown["new_tokens"]),
        "running_requests": Mean(grown["sample_seconds"], grown["busy_seconds"]),
        "running_requests_max": Max(totals["running_max"]),
        "aborted_samples": Sum(grown["aborted"]),
    }
