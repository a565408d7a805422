"""EngineMetrics: metrics of vLLM's engine since the last query, to be merged over replicas."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import attrs

from dovetail.metrics import Max, Mean, Metric, Sum

PREFIX = "rollout/vllm/"


@attrs.define
class Totals:
    """Sums over the engine's steps since the last `take`."""

    new_tokens: float = 0.0
    busy_seconds: float = 0.0
    """Sum of the seconds from each step to the next, without pauses in which there was no request."""
    steps: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    cache_usage: float = 0.0
    most_running: float = 0.0
    most_waiting: float = 0.0
    most_cache_usage: float = 0.0
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0
    preemptions: float = 0.0
    first_tokens: float = 0.0
    first_token_seconds: float = 0.0


class EngineMetrics:
    """Collects metrics at every step of the engine, in vLLM's output thread, until `take` returns them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = Totals()
        self._last_step: float | None = None

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Add the statistics of one engine step.

        Args:
            scheduler: vLLM's SchedulerStats, or None.
            iteration: vLLM's IterationStats, or None.
        """
        now = time.monotonic()
        with self._lock:
            totals = self._totals
            if iteration is not None:
                if self._last_step is not None:
                    totals.busy_seconds += now - self._last_step
                totals.new_tokens += iteration.num_generation_tokens
                totals.preemptions += iteration.num_preempted_reqs
                firsts = iteration.time_to_first_tokens_iter
                totals.first_tokens += len(firsts)
                totals.first_token_seconds += sum(firsts)
            self._last_step = now
            if scheduler is not None:
                self._note_scheduler(scheduler)

    def take(self) -> Mapping[str, Metric]:
        """Return the metrics since the last call; empty if the engine made no step."""
        with self._lock:
            totals, self._totals = self._totals, Totals()
        if not totals.steps:
            return {}
        found: dict[str, Metric] = {
            "tokens_per_second": Mean(totals.new_tokens, totals.busy_seconds),
            "new_tokens": Sum(totals.new_tokens),
            "running_requests": Mean(totals.running, totals.steps),
            "running_requests_max": Max(totals.most_running),
            "waiting_requests": Mean(totals.waiting, totals.steps),
            "waiting_requests_max": Max(totals.most_waiting),
            "kv_cache_usage": Mean(totals.cache_usage, totals.steps),
            "kv_cache_usage_max": Max(totals.most_cache_usage),
            "prefix_cache_hits": Mean(totals.prefix_hits, totals.prefix_queries),
            "preemptions": Sum(totals.preemptions),
            "time_to_first_token": Mean(totals.first_token_seconds, totals.first_tokens),
        }
        return {f"{PREFIX}{name}": metric for name, metric in found.items()}

    def _note_scheduler(self, stats: Any) -> None:
        totals = self._totals
        running, waiting = float(stats.num_running_reqs), float(stats.num_waiting_reqs)
        totals.steps += 1
        totals.running += running
        totals.waiting += waiting
        totals.cache_usage += stats.kv_cache_usage
        totals.most_running = max(totals.most_running, running)
        totals.most_waiting = max(totals.most_waiting, waiting)
        totals.most_cache_usage = max(totals.most_cache_usage, stats.kv_cache_usage)
        prefix = stats.prefix_cache_stats
        if prefix is not None:
            totals.prefix_queries += prefix.queries
            totals.prefix_hits += prefix.hits
        if not running and not waiting:
            # The time until the next step is a pause without requests, which must not count as a step.
            self._last_step = None


def stat_logger(metrics: EngineMetrics) -> type:
    """Return a subclass of vLLM's stat logger that records every step in `metrics`.

    The class replaces vLLM's Prometheus logger, which counts every token although this process has no endpoint for reading the counts.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class EngineMetricsLogger(PrometheusStatLogger):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
            self.vllm_config = vllm_config
            self.engine_indexes = engine_indexes

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            metrics.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            pass

        def record_admission_rejection(self, reason: str) -> None:
            pass

    return EngineMetricsLogger
