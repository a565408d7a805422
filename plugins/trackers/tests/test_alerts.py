"""Alerts: the data sent to a webhook and a command, neither of which ever delays or fails a run."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dovetail.config import config_from_mapping
from dovetail.errors import ConfigError
from dovetail.interfaces import PluginContext
from dovetail_trackers.alerts import AlertsTracker
from dovetail_trackers.config import AlertsConfig


class Logger:
    """A logger that records warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str, **_: object) -> None:
        self.warnings.append(text)


class Webhook:
    """A local server that records posts."""

    def __init__(self, *, hangs: bool = False, status: int = 200) -> None:
        self.alerts: list[dict[str, Any]] = []
        self.release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if hangs:
                    outer.release.wait(30)
                outer.alerts.append(json.loads(body))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}/secret-path"


@pytest.fixture
def hook(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    webhook = Webhook(**getattr(request, "param", {}))
    monkeypatch.setenv("ALERT_URL", webhook.address)
    yield webhook
    webhook.release.set()
    webhook.server.shutdown()
    webhook.server.server_close()


def started(directory: Path, start_step: int = 0, **settings: Any) -> tuple[AlertsTracker, Logger]:
    logger = Logger()
    context = PluginContext(logger=logger, run_directory=directory)
    settings = {"webhook_variable": "ALERT_URL", **settings}
    tracker = AlertsTracker(AlertsConfig(name="alerts", **settings), context)
    tracker.run_started(None, None, directory, start_step, 100)
    return tracker, logger


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "math" / "grpo"
    directory.mkdir(parents=True)
    return directory


def test_a_failure_is_told_once_with_its_cause(hook: Webhook, run: Path) -> None:
    tracker, logger = started(run)
    tracker.metrics_logged(41, {"reward/mean": 0.5})
    tracker.failure(41, RuntimeError("rank 3 died"))
    tracker.run_finished({"status": "failed", "steps": 41})
    tracker.close()
    [alert] = hook.alerts
    assert alert.pop("time").endswith("+00:00")
    assert alert.pop("host") in alert.pop("text")
    assert alert == {
        "event": "failed",
        "run": "math/grpo",
        "directory": str(run),
        "step": 41,
        "total_steps": 100,
        "message": "rank 3 died",
    }
    assert logger.warnings == []


@pytest.mark.parametrize("status", ["completed", "stopped"])
def test_an_end_without_an_error_is_told_too_unless_left_out(
    hook: Webhook, run: Path, status: str
) -> None:
    for on in ((status,), ("failed",)):
        tracker, _ = started(run, on=on)
        tracker.run_finished({"status": status, "steps": 100})
        tracker.close()
    assert [alert["event"] for alert in hook.alerts] == [status]


def test_a_restart_names_its_cause(hook: Webhook, run: Path) -> None:
    (run / "restarts.jsonl").write_text(json.dumps({"cause": "killed by SIGKILL"}) + "\n")
    tracker, _ = started(run, start_step=40)
    tracker.close()
    [alert] = hook.alerts
    assert (alert["event"], alert["step"]) == ("restarted", 40)
    assert "SIGKILL" in alert["message"]


@pytest.mark.parametrize(("total", "where"), [(100, "step 40 of 100"), (None, "step 40:")])
def test_a_run_that_is_given_up_is_told_by_a_tracker_that_heard_nothing_else(
    hook: Webhook, run: Path, total: int | None, where: str
) -> None:
    context = PluginContext(logger=Logger(), run_directory=run)
    tracker = AlertsTracker(AlertsConfig(name="alerts", webhook_variable="ALERT_URL"), context)
    tracker.given_up(run, 40, total, "killed by SIGKILL")
    tracker.close()
    [alert] = hook.alerts
    assert {name: alert[name] for name in ("event", "run", "step", "total_steps")} == {
        "event": "given_up",
        "run": "math/grpo",
        "step": 40,
        "total_steps": total,
    }
    assert "killed by SIGKILL" in alert["message"]
    assert where in alert["text"]


def test_a_run_that_no_longer_learns_is_told_once(hook: Webhook, run: Path) -> None:
    tracker, _ = started(run)
    for step in range(1, 60):
        tracker.metrics_logged(step, {"reward/mean": 0.5, "actor/grad_norm": 0.0, "actor/entropy": 0.0})  # fmt: skip
    tracker.close()
    events = [alert["event"] for alert in hook.alerts]
    assert events
    assert set(events) == {"warning"}
    assert len({alert["message"].partition(":")[0] for alert in hook.alerts}) == len(events)


def test_a_stall_is_told_once_until_the_run_works_again(hook: Webhook, run: Path) -> None:
    tracker, _ = started(run, stall_seconds=0.2)

    def told(count: int) -> bool:
        end = time.monotonic() + 20
        while len(hook.alerts) < count and time.monotonic() < end:
            time.sleep(0.02)
        return len(hook.alerts) == count

    assert told(1)
    time.sleep(0.6)
    assert len(hook.alerts) == 1
    tracker.phase_started(3, "rollout")
    assert told(2)
    assert {alert["event"] for alert in hook.alerts} == {"stalled"}
    tracker.close()


@pytest.mark.parametrize("hook", [{"hangs": True}, {"status": 500}], indirect=True)
def test_a_webhook_that_hangs_or_fails_delays_no_run_and_its_address_is_said_nowhere(
    hook: Webhook, run: Path
) -> None:
    tracker, logger = started(run, start_step=3, timeout=0.5)
    began = time.monotonic()
    for step in range(100):
        tracker.metrics_logged(step, {"reward/mean": 0.5})
    assert time.monotonic() - began < 0.4
    tracker.run_finished({"status": "completed", "steps": 100})
    tracker.close()
    assert time.monotonic() - began < 5
    [warning] = logger.warnings
    assert "secret-path" not in warning


def test_a_command_gets_the_alert_on_its_standard_input(run: Path, tmp_path: Path) -> None:
    program = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"
    command = (sys.executable, "-c", program, str(tmp_path / "told"))
    tracker, logger = started(run, webhook_variable=None, command=command, timeout=20.0)
    tracker.run_finished({"status": "stopped", "steps": 7})
    tracker.close()
    assert json.loads((tmp_path / "told").read_text())["step"] == 7
    assert logger.warnings == []


def test_a_command_that_hangs_is_ended_with_what_it_started(run: Path, tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path / 'pid'}; wait"
    tracker, logger = started(
        run, webhook_variable=None, command=("bash", "-c", script), timeout=1.0
    )
    tracker.run_finished({"status": "stopped", "steps": 7})
    tracker.close()
    tracker_thread_end = time.monotonic() + 20
    pid = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}")
    while pid.exists() and "Z" not in (pid / "stat").read_text().split()[2]:
        assert time.monotonic() < tracker_thread_end
        time.sleep(0.05)
    assert logger.warnings


@pytest.mark.parametrize("address", [None, "", "ftp://somewhere"])
def test_a_variable_without_an_address_is_refused_before_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    monkeypatch.delenv("ALERT_URL", raising=False)
    if address is not None:
        monkeypatch.setenv("ALERT_URL", address)
    with pytest.raises(ConfigError, match="ALERT_URL"):
        started(run)


def test_alerts_that_reach_nobody_are_refused() -> None:
    with pytest.raises(ConfigError, match="`command`, `webhook_variable` or both"):
        config_from_mapping({"model": {"path": "m"}, "tracking": [{"name": "alerts"}]})
