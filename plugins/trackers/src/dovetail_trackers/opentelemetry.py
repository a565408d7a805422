"""OpentelemetryTracker: sends metrics and traces to OpenTelemetry, over OTLP/HTTP."""

from __future__ import annotations

import functools
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from logging.handlers import BufferingHandler
from time import time_ns
from typing import Any

import attrs

from dovetail.interfaces import Failure, PluginContext, Sample, Trajectory
from dovetail_trackers.background import BackgroundTracker, TrackedRun, TrackerError
from dovetail_trackers.config import OpentelemetryConfig


@attrs.frozen
class _Span:
    """A span that has ended, with times in nanoseconds since 1970."""

    name: str
    start: int
    end: int
    attributes: Mapping[str, Any] = attrs.field(factory=dict)
    error: str | None = None


class OpentelemetryTracker(BackgroundTracker):
    """Sends metrics as gauges, and each step as a trace: a span for the step, with child spans for phases and episodes.

    OpenTelemetry's environment variables give the address (`OTEL_EXPORTER_OTLP_ENDPOINT`, …). A phase between two steps, such as a
    validation, is a separate trace. Only agent loops have episodes; a single response to a prompt is not an episode.
    """

    name = "opentelemetry"
    Config = OpentelemetryConfig
    module = "opentelemetry.exporter.otlp.proto.http"
    rewinds = True  # a repeated step does no harm, since values have time stamps

    def __init__(self, config: OpentelemetryConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._step_began, self._failed = 0, False
        self._phases: list[tuple[str, int]] = []
        self._episodes: list[_Span] = []
        self._exporters: dict[str, Any] = {}

    # ── hooks, called in the training thread ──

    def step_started(self, step: int) -> None:
        self._put_spans(step - 1)
        self._step_began = time_ns()

    def phase_started(self, step: int, phase: str) -> None:
        self._phases.append((phase, time_ns()))

    def rollout_finished(self, step: int, samples: Sequence[Sample]) -> None:
        if self.config.samples:
            self._episodes += [_episode(s, t) for s in samples if (t := s.trajectory) and t.began]

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put_spans(step, metrics)

    def failure(self, step: int, error: BaseException) -> None:
        self._put_spans(step + 1, error=f"{type(error).__name__}: {error}"[:2000])

    def run_finished(self, summary: Mapping[str, Any]) -> None:
        self._put_spans(int(summary.get("steps", 0)))
        super().run_finished(summary)
        if self._failed:  # don't wait for an unreachable collector: end the export in progress
            for exporter in self._exporters.values():
                exporter.shutdown()

    def _put_spans(
        self, step: int, metrics: Mapping[str, float] | None = None, error: str | None = None
    ) -> None:
        """Queue the spans of the step that ends now, with its phases and episodes; between two steps, only those of the phases.

        Args:
            step: the number of the step.
            metrics: the metrics of the step, of which `time/NAME` gives the seconds of the phase NAME.
            error: the error that ended the step, if any.
        """
        now, began = time_ns(), self._step_began
        phases = [*self._ended_phases(now, metrics or {}, step), *self._episodes]
        root = _Span("step", began, now, {"dovetail.step": step}, error) if began else None
        self._step_began, self._phases, self._episodes = 0, [], []
        if root or phases:
            self._put(lambda: self._write_spans(root, phases))

    def _ended_phases(self, now: int, metrics: Mapping[str, float], step: int) -> Iterator[_Span]:
        """Yield the spans of the recorded phases. A phase ends when the next one begins, or after the seconds of its metric `time/NAME` if
        that is earlier; the last phase ends at `now` at the latest.
        """
        names = [name for name, _ in self._phases]
        for (name, start), (_, following) in pairwise([*self._phases, ("", now)]):
            seconds = metrics.get(f"time/{name}", math.inf) if names.count(name) == 1 else math.inf
            end = int(min(following - start, seconds * 1e9)) + start
            yield _Span(name, start, end, {"dovetail.step": step})

    # ── run in the tracker's thread ──

    def open_run(self, run: TrackedRun) -> str:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider

        about = {
            "service.name": "dovetail",
            "service.instance.id": f"{run.project}/{run.name}",
            "dovetail.tags": self.config.tags,
            "dovetail.notes": self.config.notes,
        }
        # Attributes in OTEL_RESOURCE_ATTRIBUTES take precedence.
        resource = Resource.create(about).merge(OTELResourceDetector().detect())
        self._metrics = InMemoryMetricReader()
        tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        meters = MeterProvider([self._metrics], resource, shutdown_on_exit=False)
        self._tracer = tracers.get_tracer("dovetail")
        self._gauge = functools.cache(meters.get_meter("dovetail").create_gauge)
        # The exporters log every failed try. Keep these records for the tracker's own warning instead.
        logger, self._said = logging.getLogger("opentelemetry.exporter.otlp"), BufferingHandler(99)
        logger.handlers, logger.propagate = [self._said], False
        makes = {"TRACES": OTLPSpanExporter, "METRICS": OTLPMetricExporter}
        left_out = {s for s in makes if os.environ.get(f"OTEL_{s}_EXPORTER") == "none"}
        self._exporters = {s: make() for s, make in makes.items() if s not in left_out}
        self._run_began = time_ns()
        self.write_metrics(run.start_step, {})
        return str(about["service.instance.id"])

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in {**metrics, "step": step}.items():
            self._gauge(_metric_name(name)).set(value)
        self._export("METRICS", self._metrics.get_metrics_data())

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: OpenTelemetry has no tables."""

    def end_run(self, status: str) -> None:
        error = "the run failed" if status == "failed" else None
        about = {"dovetail.status": status}
        self._write_spans(_Span("run", self._run_began, time_ns(), about, error), [])

    def _write_spans(self, root: _Span | None, below: Sequence[_Span]) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        context, recorded = None, []
        for span in [*([root] if root else []), *below]:
            about = {"attributes": span.attributes, "start_time": span.start}
            made = self._tracer.start_span(span.name, context, **about)
            context = set_span_in_context(made) if span is root else context
            recorded += [made] if made.is_recording() else []  # a trace sampler may drop spans
            if span.error:
                made.set_status(Status(StatusCode.ERROR, span.error))
            made.end(span.end)
        self._export("TRACES", recorded)

    def _export(self, signal: str, data: Any) -> None:
        if signal not in self._exporters or not data:
            return
        given_up = self._failed and self._ending.is_set()
        self._failed = given_up or self._exporters[signal].export(data).name != "SUCCESS"
        if self._failed:
            said = " ".join(record.getMessage() for record in self._said.buffer[-2:])
            raise TrackerError(
                f"the OpenTelemetry collector did not accept the data: {said}",
                hint="set OTEL_EXPORTER_OTLP_ENDPOINT to the collector's address (by default http://localhost:4318). To turn traces off, "
                "set OTEL_TRACES_EXPORTER=none; to turn metrics off, set OTEL_METRICS_EXPORTER=none",
            )


def _episode(sample: Sample, trajectory: Trajectory) -> _Span:
    outcome = sample.outcome
    about = {
        "dovetail.sample": sample.sample_id,
        "dovetail.turns": len(trajectory.turns),
        "dovetail.tool_calls": len(trajectory.calls),
        "dovetail.tokens": sample.response_length,
        "dovetail.end": str(trajectory.end),
        **({} if sample.score is None else {"dovetail.score": sample.score}),
    }
    error = f"{outcome.kind}: {outcome.message}" if isinstance(outcome, Failure) else None
    start = int(trajectory.began * 1e9)
    return _Span("episode", start, start + int(trajectory.seconds * 1e9), about, error)


def _metric_name(name: str) -> str:
    """Return a name that OpenTelemetry takes: `dovetail.val.mean_at_1` for `val/mean@1`."""
    plain = name.replace("/", ".").replace("@", "_at_")
    return f"dovetail.{re.sub(r'[^A-Za-z0-9_.-]', '_', plain)}"[:255]
