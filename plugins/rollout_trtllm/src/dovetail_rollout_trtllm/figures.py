"""Figures of a TensorRT-LLM server: what it did since it was last asked, as metrics that merge over replicas."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.telemetry.metrics import Max, Mean, Metric, Sum

PREFIX = "rollout/trtllm/"


class Figures:
    """Turns totals since a server's start into figures since the last look."""

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}

    def since(self, totals: Mapping[str, float]) -> Mapping[str, Metric]:
        """The metrics since the last totals.

        Args:
            totals: the server's answer to `figures`.

        Returns:
            `tokens_per_second` and `new_tokens`, aborted samples' tokens among them; `running_requests`, on average over
            the time in which any ran, and at most; `aborted_samples`. Empty where nothing was generated.
        """
        before, self._before = self._before, dict(totals)
        grown = {name: value - before.get(name, 0.0) for name, value in totals.items()}
        if not grown["samples"]:
            return {}
        found: dict[str, Metric] = {
            "tokens_per_second": Mean(grown["new_tokens"], grown["busy_seconds"]),
            "new_tokens": Sum(grown["new_tokens"]),
            "running_requests": Mean(grown["sample_seconds"], grown["busy_seconds"]),
            "running_requests_max": Max(totals["running_max"]),
            "aborted_samples": Sum(grown["aborted"]),
        }
        return {f"{PREFIX}{name}": metric for name, metric in found.items()}
