"""AlertsTracker: sends an alert if a run stops, fails, stalls, no longer learns, is restarted, or is given up."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import threading
import urllib.request
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces import PluginContext, Tracker
from dovetail.telemetry import read_rows
from dovetail_diagnosis import diagnose
from dovetail_trackers.config import AlertsConfig

TRIES = 3
"""Maximum number of attempts to send an alert."""


class AlertsTracker(Tracker):
    """Sends alerts by a command, a webhook or both, in a separate thread: a slow or failing destination does not affect the run.

    An alert is a JSON object, which the command reads from standard input. Its keys are `event` (one of the config's `on`), `run`
    (PROJECT/EXPERIMENT), `directory`, `host`, `step`, `total_steps` (null if not known yet), `message`, `time` (UTC, ISO 8601) and `text`,
    a one-line summary that Slack and Mattermost show.

    In a config:

        tracking: [console, {name: alerts, webhook_variable: SLACK_WEBHOOK, on: [failed, stalled]}]
    """

    name = "alerts"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = AlertsConfig

    def __init__(self, config: AlertsConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._address = ""
        if config.webhook_variable is not None:
            self._address = os.environ.get(config.webhook_variable, "")
            if not self._address.startswith(("https://", "http://")):
                raise ConfigError(
                    f"the environment variable {config.webhook_variable} (tracking.alerts.webhook_variable) holds no address; expected one that starts with https:// or http://",
                    hint=f"export {config.webhook_variable}=https://…, or leave out tracking.alerts.webhook_variable",
                )
        self._run: dict[str, Any] = {}
        self._step = 0
        self._diagnosis = diagnose(())
        self._error: str | None = None
        self._queue: deque[dict[str, Any]] = deque()
        self._ready = threading.Condition()
        self._ending = False
        self._deadline = math.inf
        self._thread: threading.Thread | None = None
        self._seen = math.inf
        """Time of the run's last activity, in seconds of `monotonic`; infinity if silence is not a stall."""
        self._warned = False

    # ── hooks, called in the training thread ──

    def run_started(
        self, config: Any, plan: Any, directory: Path, start_step: int, total_steps: int
    ) -> None:
        self._begin(directory, start_step, total_steps)
        self._diagnosis = diagnose(read_rows(directory / "metrics.jsonl"))
        restarts = read_rows(directory / "restarts.jsonl")
        if start_step or restarts:
            cause = restarts[-1].get("cause") if restarts else None
            self._alert(
                "restarted",
                f"the run continues from step {start_step}" + (f"; {cause}" if cause else ""),
            )
        self._at_work()

    def step_started(self, step: int) -> None:
        self._at_work()

    def phase_started(self, step: int, phase: str) -> None:
        self._at_work()

    def metrics_logged(self, step: int, metrics: Mapping[str, float]) -> None:
        self._at_work()
        self._step = max(step, self._step)
        for warning in self._diagnosis.observe(step, metrics):
            self._alert("warning", f"{warning.name}: {warning.message}; {warning.hint}")

    def failure(self, step: int, error: BaseException) -> None:
        self._error = str(error)[:2000] or type(error).__name__

    def run_finished(self, summary: Mapping[str, Any]) -> None:
        status = str(summary.get("status"))
        self._step = int(summary.get("steps", self._step))
        self._seen = math.inf
        self._alert(status, self._error or f"the run is {status}")
        self._end()

    def given_up(self, directory: Path, step: int, total_steps: int | None, cause: str) -> None:
        self._begin(directory, step, total_steps)
        self._alert("given_up", f"the run has ended and is not restarted; {cause}")

    def close(self) -> None:
        self._end()
        thread, self._thread = self._thread, None
        if thread is not None:
            # Limit the wait, since a thread that hangs in a call can't be ended; the daemon thread ends with the process.
            thread.join(max(0.0, self._deadline - monotonic()))
            if self._queue or thread.is_alive():
                self._warn("alerts were not sent before the end of the run")

    def _begin(self, directory: Path, step: int, total_steps: int | None) -> None:
        self._run = {
            "run": "/".join(directory.absolute().parts[-2:]),
            "directory": str(directory.absolute()),
            "host": socket.gethostname(),
            "total_steps": total_steps,
        }
        self._step = step
        self._thread = threading.Thread(target=self._work, name="dovetail-alerts", daemon=True)
        self._thread.start()

    def _end(self) -> None:
        with self._ready:
            if not self._ending:
                self._ending, self._deadline = True, monotonic() + self.config.timeout
                self._ready.notify_all()

    def _at_work(self) -> None:
        self._seen = monotonic()

    def _alert(self, event: str, message: str) -> None:
        if event not in self.config.on:
            return
        total = self._run.get("total_steps")
        where = f"step {self._step}" + ("" if total is None else f" of {total}")
        alert = {
            "event": event,
            **self._run,
            "step": self._step,
            "message": message,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "text": f"{self._run.get('run')} on {self._run.get('host')}: {event} at {where}: {message}",
        }
        with self._ready:
            self._queue.append(alert)
            self._ready.notify_all()

    # ── run in the tracker's thread ──

    def _work(self) -> None:
        stalled_since = math.inf
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue or self._ending, self._look_seconds)
                alert = self._queue[0] if self._queue else None
                if alert is None and self._ending:
                    return
            if alert is not None:
                self._send(alert)
                self._queue.popleft()
            elif (
                self._seen != stalled_since and monotonic() - self._seen > self.config.stall_seconds
            ):
                stalled_since = self._seen
                self._alert(
                    "stalled",
                    f"the run has shown no progress for {self.config.stall_seconds:g} seconds",
                )

    @property
    def _look_seconds(self) -> float:
        return min(self.config.stall_seconds / 4, 30.0)

    def _send(self, alert: Mapping[str, Any]) -> None:
        body = json.dumps(alert).encode()
        for send in [*([self._post] if self._address else []), *([self._call] if self.config.command else [])]:  # fmt: skip
            for number in range(1, TRIES + 1):
                try:
                    send(body)
                    break
                except Exception as error:  # noqa: BLE001 - whatever is wrong with an alert, the run goes on
                    # The address may be a secret, and urllib's errors may contain it.
                    text = f"{type(error).__name__}: {error}".replace(
                        self._address or "\0", "ADDRESS"
                    )
                    self._warn(f"an alert was not sent: {text}")
                    with self._ready:
                        if number < TRIES:
                            self._ready.wait_for(lambda: self._ending, self.config.timeout / 2)

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "dovetail"}
        request = urllib.request.Request(self._address, data=body, headers=headers)  # noqa: S310 - http or https, see above
        with urllib.request.urlopen(request, timeout=self.config.timeout) as answer:  # noqa: S310
            answer.read(1024)

    def _call(self, body: bytes) -> None:
        with subprocess.Popen(  # noqa: S603 - the user's command
            self.config.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        ) as process:
            try:
                process.communicate(body, timeout=self.config.timeout)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also kills the command's children
            if process.returncode:
                raise RuntimeError(
                    f"the alert command {self.config.command[0]} ended with exit code {process.returncode}"
                )

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self.context.logger.warning(f"tracker alerts: {text}; the run continues")
