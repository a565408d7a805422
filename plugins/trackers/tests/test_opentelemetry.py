"""The data that a collector receives over OTLP/HTTP, decoded by OpenTelemetry; and a collector that is unreachable or hangs."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import dovetail
from dovetail.errors import DovetailError
from dovetail.interfaces import PluginContext
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_trackers.opentelemetry import OpentelemetryTracker

pytestmark = [
    pytest.mark.trackers,
    pytest.mark.skipif(
        importlib.util.find_spec("opentelemetry.proto") is None,
        reason="the trackers' libraries are not installed here",
    ),
]


class Collector:
    """A local collector that decodes and records posts."""

    def __init__(self, answer: threading.Event | None = None) -> None:
        """Start the server; if an event is given, answer no request before the event is set."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
            ExportMetricsServiceRequest,
        )
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        self.spans: list[Any] = []
        self.points: list[tuple[str, float]] = []
        self.resource: dict[str, str] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                if answer is not None:
                    answer.wait()
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces":
                    for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
                        outer.note(batch.resource)
                        outer.spans += [span for s in batch.scope_spans for span in s.spans]
                elif self.path == "/v1/metrics":
                    for batch in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                        outer.note(batch.resource)
                        outer.points += [
                            (m.name, p.as_double or float(p.as_int))
                            for s in batch.scope_metrics
                            for m in s.metrics
                            for p in m.gauge.data_points
                        ]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def note(self, resource: Any) -> None:
        self.resource = {a.key: a.value.string_value for a in resource.attributes}

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def below(self, span: Any) -> list[Any]:
        return [each for each in self.spans if each.parent_span_id == span.span_id]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector whose address is in OpenTelemetry's environment variables."""
    for name in ("OTEL_SERVICE_NAME", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    yield made
    made.server.shutdown()


def started(directory: Path, **settings: Any) -> OpentelemetryTracker:
    """Start a run, and return the tracker."""
    directory.mkdir(parents=True, exist_ok=True)
    context = PluginContext(logger=logging.getLogger("test"))
    config = OpentelemetryTracker.Config(name="opentelemetry", **settings)
    tracker = OpentelemetryTracker(config, context)
    tracker.run_started(None, None, directory, start_step=0, total_steps=1)
    return tracker


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


LOOP = """
from dovetail.interfaces import AgentLoop

class Once(AgentLoop):
    name, api = "once", ">=1.0,<2"

    async def run(self, session):
        await session.generate()
"""


def test_a_runs_steps_phases_episodes_and_metrics_reach_the_collector(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=tests")
    (tmp_path / "loop.py").write_text(LOOP)
    rows = [
        {"prompt": f"{a} + 1 =", "reward_model": {"ground_truth": str(a + 1)}} for a in range(4)
    ]
    began = time.time_ns()
    summary = dovetail.train(
        {
            "project": "sums",
            "experiment": "first",
            "output_dir": str(tmp_path / "runs"),
            "model": {"path": str(tiny_model_and_tokenizer(tmp_path / "model", vocab_size=300))},
            "data": {"train_batch_size": 2, "max_prompt_length": 64, "max_response_length": 4},
            "rollout": {
                "name": "hf",
                "n": 2,
                "agent_loop": {"path": str(tmp_path / "loop.py"), "attribute": "Once"},
            },
            "trainer": {"total_steps": 2, "save_every": 0},
            "tracking": ["jsonl", "opentelemetry"],
        },
        reward=lambda solution_str: len(solution_str) / 10,
        dataset=rows,
        val_dataset=rows[:2],
    )
    assert summary["status"] == "completed"
    steps = collector.named("step")
    assert [attributes(span)["dovetail.step"] for span in steps] == [1, 2]
    for step in steps:
        below = collector.below(step)
        assert {"rollout", "update_actor", "weight_sync"} <= {span.name for span in below}
        phases = [span for span in below if span.name != "episode"]
        for span in phases:
            assert began < step.start_time_unix_nano <= span.start_time_unix_nano
            assert span.start_time_unix_nano <= span.end_time_unix_nano <= step.end_time_unix_nano
        for one, other in pairwise(phases):
            assert one.end_time_unix_nano <= other.start_time_unix_nano
        episodes = [span for span in below if span.name == "episode"]
        assert len(episodes) == 4
        rollout = next(span for span in phases if span.name == "rollout")
        for span in episodes:
            about = attributes(span)
            assert (about["dovetail.turns"], about["dovetail.end"]) == (1, "done")
            assert 1 <= about["dovetail.tokens"] <= 4
            # Allow 0.1 s, since the system clock may be adjusted in between.
            assert span.start_time_unix_nano > rollout.start_time_unix_nano - 1e8
            assert span.end_time_unix_nano < rollout.end_time_unix_nano + 1e8
    assert [span.parent_span_id for span in collector.named("validation")] == [b""] * 2
    [run] = collector.named("run")
    assert attributes(run)["dovetail.status"] == "completed"

    lines = (Path(summary["directory"]) / "metrics.jsonl").read_text().splitlines()
    for name, sent in (("reward/mean", "reward.mean"), ("val/mean@1", "val.mean_at_1")):
        logged = [row[name] for row in map(json.loads, lines) if name in row]
        # Every export repeats the gauges' last values.
        values = [v for n, v in collector.points if n == f"dovetail.{sent}"]
        assert list(dict.fromkeys(values)) == list(dict.fromkeys(logged))
        assert len(logged) == 2
    assert [v for n, v in collector.points if n == "dovetail.step"][-1] == 2
    assert collector.resource["service.name"] == "dovetail"
    assert collector.resource["service.instance.id"] == "sums/first"
    assert collector.resource["deployment.environment"] == "tests"


def test_a_step_that_fails_is_an_error_and_the_environment_names_the_service(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "team-rl")
    tracker = started(tmp_path / "p" / "e")
    tracker.step_started(3)
    tracker.phase_started(2, "rollout")
    tracker.failure(2, DovetailError("no replica is left"))
    tracker.run_finished({"status": "failed", "steps": 2})
    tracker.close()
    [step] = collector.named("step")
    [rollout] = collector.below(step)
    assert (rollout.name, attributes(step)["dovetail.step"]) == ("rollout", 3)
    assert step.status.code == 2
    assert "replica is left" in step.status.message
    assert [span.status.code for span in collector.named("run")] == [2]
    assert collector.resource["service.name"] == "team-rl"


def test_one_of_the_two_signals_can_be_left_out(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    tracker = started(tmp_path / "p" / "e")
    tracker.step_started(1)
    tracker.step_finished(1, {})
    tracker.metrics_logged(1, {"a b/ü@1": 2.0})
    tracker.run_finished({"status": "completed"})
    tracker.close()
    assert collector.spans == []
    assert ("dovetail.a_b.__at_1", 2.0) in collector.points


@pytest.mark.parametrize("hangs", [False, True], ids=["away", "hangs"])
def test_a_dead_collector_neither_slows_nor_ends_a_run_and_what_is_lost_is_counted(
    tmp_path: Path,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    hangs: bool,
) -> None:
    collector.server.shutdown()
    collector.server.server_close()
    answer = threading.Event()
    if hangs:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", Collector(answer).url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    began = time.monotonic()
    tracker = started(tmp_path / "p" / "e", close_seconds=2.0)
    for step in range(1, 501):
        tracker.step_started(step)
        tracker.metrics_logged(step, {"reward/mean": 0.5})
        tracker.step_finished(step, {})
    assert time.monotonic() - began < 1.0
    while not hangs and "could not be opened" not in caplog.text:
        assert time.monotonic() - began < 30
        time.sleep(0.02)
    ended = time.monotonic()
    tracker.run_finished({"status": "completed"})
    tracker.close()
    answer.set()
    assert time.monotonic() - ended < 4.0
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in caplog.text or hangs
    assert re.search("100[01] still waiting at the end", caplog.text)  # one call may be running
    assert len(caplog.records) <= 2
    assert capfd.readouterr().err == ""


def test_a_collector_that_comes_late_gets_all(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    late = Collector(answer)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", late.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    tracker = started(tmp_path / "p" / "e", retry_seconds=0.1)
    for step in range(1, 4):
        tracker.step_started(step)
        tracker.step_finished(step, {})
    time.sleep(0.5)
    answer.set()
    while len(late.named("step")) < 3:
        time.sleep(0.02)
    tracker.run_finished({"status": "completed"})
    tracker.close()
    assert len(late.named("run")) == 1
