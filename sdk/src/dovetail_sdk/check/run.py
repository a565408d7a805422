"""Checks installed plugins in processes of their own, and makes reports. A crash of a plugin is a line in its report."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dovetail.plugins.entry import PluginEntry
from dovetail.plugins.index import default_index
from dovetail_console.conformance_report import SCHEMA, tier as tier_of
from dovetail_sdk.check.process import Ended, checking

TIMEOUT = 1800.0
"""Seconds that all checks of one plugin may take."""
_VERSIONS = ("dovetail-core", "dovetail-sdk", "torch", "transformers", "numpy")


def check_plugins(
    entries: Iterable[PluginEntry],
    overrides: Sequence[str] = (),
    *,
    only: str | None = None,
    timeout: float = TIMEOUT,
) -> Iterator[dict[str, Any]]:
    """Check plugins, in one process per distribution, and yield each plugin's report when it is ready.

    After a crash or a time-out, the next plugin is checked in a fresh process.

    Args:
        entries: the plugins to check; broken ones get a report too.
        overrides: `key=value` settings of the plugins' configs, which the suites use.
        only: a pytest `-k` expression: run these tests alone. A report then has no tier.
        timeout: seconds for each plugin until the process is killed; the check or test that was running then counts as failed.

    Yields:
        `{"schema", "plugin", "interface", "versions", "date", "config", "settings", "checks", "facts", "tests", "not_run", "tier",
        "seconds"}`: `config` holds the overrides. `settings` holds, for each suite, what the plugin's author changed from the default
        suite. `checks` and `tests` hold names, outcomes (passed, failed, expected, skipped) and reasons. `facts` are those of
        `facts_of`. `not_run` is the reason why the suite could not run, or null. `tier` is the quality tier that the plugin has
        earned, from `bronze` to `platinum`, or null.
    """
    parts: dict[str, list[PluginEntry]] = {}
    for entry in entries:
        parts.setdefault(entry.distribution, []).append(entry)
    for part in parts.values():
        for entry in part:
            if not _importable(entry):
                report = _begun(entry, overrides, only)
                report["not_run"] = "the class was not imported"
                yield _finished(report, time.monotonic())
        left = [entry for entry in part if _importable(entry)]
        while left:
            for report in _together(left, overrides, only, timeout):
                left = left[1:]
                yield report


def _together(
    entries: Sequence[PluginEntry], overrides: Sequence[str], only: str | None, timeout: float
) -> Iterator[dict[str, Any]]:
    """Yield the reports of plugins that one process checks, up to and including the plugin at which the process dies."""
    waiting = iter(entries)
    report, began = _begun(next(waiting), overrides, only), time.monotonic()
    running: str | None = None
    for line in checking(entries, overrides, only, timeout):
        if isinstance(line, Ended):
            if line.how is not None:
                _add_end(report, line.how, running)
                yield _finished(report, began)
        elif "checked" in line:
            yield _finished(report, began)
            following = next(waiting, None)
            if following is not None:
                report, began, running = _begun(following, overrides, only), time.monotonic(), None
        else:
            running = line.get("start", running)
            _take(report, line)


def _importable(entry: PluginEntry) -> bool:
    return entry.state in ("compatible", "conflict")


def _begun(entry: PluginEntry, overrides: Sequence[str], only: str | None) -> dict[str, Any]:
    """Return the initial report of a plugin, with what is known before its class is imported."""
    return {
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
            "version": kind.api if (kind := default_index().kinds.get(entry.kind)) else None,
        },
        "versions": _versions(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "config": list(overrides),
        "settings": {},
        "only": only,
        "checks": [_declared(entry)],
        "facts": {},
        "tests": [],
        "not_run": None,
    }


def _finished(report: dict[str, Any], began: float) -> dict[str, Any]:
    report["tier"] = None if report["only"] else tier_of(report)
    report["seconds"] = round(time.monotonic() - began, 1)
    return report


def _declared(entry: PluginEntry) -> dict[str, Any]:
    """Return the result of the check `declaration`: whether entry point, manifest and interface version agree. Imports no plugin."""
    sound = entry.state == "compatible"
    return {
        "name": "declaration",
        "outcome": "passed" if sound else "failed",
        "message": None if sound else f"{entry.title} is {entry.state}: {entry.reason}",
        "hint": None if sound else entry.fix,
    }


def _take(report: dict[str, Any], line: dict[str, Any]) -> None:
    """Add to the report what a line of the checking process says: a check, a test, facts, settings, or why the suite was not run."""
    if "check" in line:
        report["checks"].append(line["check"])
    elif "test" in line:
        report["tests"].append(line["test"])
    elif "settings" in line:
        report["settings"] = line["settings"]
    elif "facts" in line:
        report["facts"] = line["facts"]
    elif "unmet" in line:
        report["not_run"] = f"it needs {line['unmet']}"
    elif "broken" in line:
        report["checks"].append(
            {"name": "suite", "outcome": "failed", "message": line["broken"], "hint": None}
        )


def _add_end(report: dict[str, Any], how: str, running: str | None) -> None:
    """Add a failed check to the report, since the process died while it checked this plugin.

    Args:
        report: the plugin's report.
        how: how the process ended (see `Ended`).
        running: the check or test that was running; None if none had begun.
    """
    hint = f"run that alone under a debugger, or report it to the author of {report['plugin']['distribution']}"
    at = f" in {running}" if running else ""
    report["checks"].append(
        {"name": "process", "outcome": "failed", "message": f"{how}{at}", "hint": hint}
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
