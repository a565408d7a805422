"""Figures: what a server of SGLang's did since it was last asked, as metrics that merge over replicas."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dovetail.telemetry.metrics import Max, Mean, Metric, Sum

PREFIX = "rollout/sglang/"


class Counters:
    """Counts inside a server, from its start on; the highest number of running samples starts anew with every look."""

    def __init__(self) -> None:
        self._totals = dict.fromkeys(
            (
                "new_tokens",
                "prompt_tokens",
                "cached_tokens",
                "samples",
                "busy_seconds",
                "sample_seconds",
            ),
            0.0,
        )
        self._running, self._most = 0, 0
        self._since = time.monotonic()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, one sample runs."""
        self._advance()
        self._running += 1
        self._most = max(self._most, self._running)
        try:
            yield
        finally:
            self._advance()
            self._running -= 1

    def note(self, about: Mapping[str, Any], new_tokens: int) -> None:
        """Count a sample that has ended.

        Args:
            about: SGLang's `meta_info` of it.
            new_tokens: of its response.
        """
        self._totals["samples"] += 1
        self._totals["new_tokens"] += new_tokens
        self._totals["prompt_tokens"] += about.get("prompt_tokens") or 0
        self._totals["cached_tokens"] += about.get("cached_tokens") or 0

    def totals(self) -> dict[str, float]:
        """Totals since the start, and the most samples that ran at once since the last look."""
        self._advance()
        most, self._most = self._most, self._running
        return {**self._totals, "running_max": float(most)}

    def _advance(self) -> None:
        now = time.monotonic()
        if self._running:
            self._totals["busy_seconds"] += now - self._since
            self._totals["sample_seconds"] += self._running * (now - self._since)
        self._since = now


class Figures:
    """Turns totals since a server's start into figures since the last look."""

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}

    def since(self, totals: Mapping[str, float]) -> Mapping[str, Metric]:
        """The metrics since the last totals; empty where nothing was generated.

        Args:
            totals: the server's answer to `figures`.
        """
        before, self._before = self._before, dict(totals)
        grown = {name: value - before.get(name, 0.0) for name, value in totals.items()}
        if not grown["new_tokens"]:
            return {}
        found: dict[str, Metric] = {
            "tokens_per_second": Mean(grown["new_tokens"], grown["busy_seconds"]),
            "new_tokens": Sum(grown["new_tokens"]),
            "prefix_cache_hits": Mean(grown["cached_tokens"], grown["prompt_tokens"]),
            "running_requests": Mean(grown["sample_seconds"], grown["busy_seconds"]),
            "running_requests_max": Max(totals["running_max"]),
        }
        return {f"{PREFIX}{name}": metric for name, metric in found.items()}
