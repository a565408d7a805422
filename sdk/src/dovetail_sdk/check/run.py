"""Checks an installed plugin in a process of its own and makes a report: a crash of the plugin is a line in it."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from dovetail.plugins.conformance import SCHEMA
from dovetail.plugins.conformance import tier as tier_of
from dovetail.plugins.entry import PluginEntry
from dovetail.plugins.kinds import KINDS

TIMEOUT = 1800.0
"""Seconds that all checks of one plugin may take."""
_VERSIONS = ("dovetail-core", "dovetail-sdk", "torch", "transformers", "numpy")


def check_plugin(
    entry: PluginEntry,
    overrides: Sequence[str] = (),
    *,
    only: str | None = None,
    timeout: float = TIMEOUT,
) -> dict[str, Any]:
    """Check a plugin and return the report.

    Args:
        entry: the plugin, whatever its state.
        overrides: `key=value` settings of its config for the suite.
        only: a pytest `-k` expression: run these tests alone. The report then has no tier.
        timeout: seconds until the process is ended, and what it was at counts as failed.

    Returns:
        `{"schema", "plugin", "interface", "versions", "date", "config", "checks", "facts", "tests", "not_run", "tier",
        "seconds"}`: `checks` and `tests` each hold name, outcome (passed, failed, expected, skipped) and the reason;
        `not_run` says why the suite could not run here, null where it did.
    """
    began = time.monotonic()
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "plugin": {
            "kind": entry.kind,
            "name": entry.name,
            "distribution": entry.distribution,
            "version": entry.version,
            "target": entry.target,
        },
        "interface": {
            "range": entry.interface,
            "version": KINDS[entry.kind].api if entry.kind in KINDS else None,
        },
        "versions": _versions(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "config": list(overrides),
        "only": only,
        "checks": [_declared(entry)],
        "facts": {},
        "tests": [],
        "not_run": None,
    }
    if entry.state in ("compatible", "conflict"):
        _take(report, *_child(entry, overrides, only, timeout))
    else:
        report["not_run"] = "the class was not imported"
    report["tier"] = None if only else tier_of(report)
    report["seconds"] = round(time.monotonic() - began, 1)
    return report


def _declared(entry: PluginEntry) -> dict[str, Any]:
    """What can be seen without importing the plugin: entry point, manifest, interface."""
    sound = entry.state == "compatible"
    return {
        "name": "declaration",
        "outcome": "passed" if sound else "failed",
        "message": None if sound else f"{entry.title} is {entry.state}: {entry.reason}",
        "hint": None if sound else entry.mend,
    }


def _take(report: dict[str, Any], lines: list[dict[str, Any]], ended: str | None) -> None:
    """Sort what the process wrote into the report."""
    running = None
    for line in lines:
        running = line.get("start", running)
        if "check" in line:
            report["checks"].append(line["check"])
        elif "test" in line:
            report["tests"].append(line["test"])
        elif "facts" in line:
            report["facts"] = line["facts"]
        elif "unmet" in line:
            report["not_run"] = f"it needs {line['unmet']}"
        elif "broken" in line:
            report["checks"].append(
                {"name": "suite", "outcome": "failed", "message": line["broken"], "hint": None}
            )
    if ended is None:
        return
    hint = f"run that alone under a debugger, or report it to the author of {report['plugin']['distribution']}"
    at = f" in {running}" if running else ""
    report["checks"].append(
        {"name": "process", "outcome": "failed", "message": f"{ended}{at}", "hint": hint}
    )


def _child(
    entry: PluginEntry, overrides: Sequence[str], only: str | None, timeout: float
) -> tuple[list[dict[str, Any]], str | None]:
    """The lines that the process wrote, and how it ended where it did not end well."""
    asked = json.dumps(
        {
            "path": sys.path,
            "kind": entry.kind,
            "name": entry.name,
            "distribution": entry.distribution,
            "overrides": list(overrides),
            "only": only,
        }
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with tempfile.TemporaryFile("w+") as answers, tempfile.TemporaryFile("w+") as noise:
        answers_fd = answers.fileno()
        try:
            code: int | None = subprocess.run(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "dovetail_sdk.check.child", str(answers_fd)],
                input=asked,
                stdout=noise,
                stderr=noise,
                text=True,
                timeout=timeout,
                pass_fds=(answers_fd,),
                env=environment,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
        answers.seek(0)
        noise.seek(0)
        lines = [json.loads(line) for line in answers if line.endswith("\n")]
        last = noise.read().strip().splitlines()[-1:]
    if lines and lines[-1].get("done"):
        return lines, None
    if code is None:
        return lines, f"the process was ended after {timeout:g} s"
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return lines, f"the process {how}" + (f" ({last[0]})" if last else "")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
