"""Conformance reports: the results of `dovetail plugins check` that a package ships, and the plugin's tier that follows from them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dovetail.plugins import PluginEntry, package_directories

FILE_NAME = "dovetail-conformance.json"
"""Name of the file of reports beside the manifest: `{"schema", "reports": [report, …]}`."""
SCHEMA = 1

Tier = Literal["bronze", "silver", "gold", "platinum"]
Outcome = Literal["passed", "failed", "expected", "skipped"]
"""The outcome of a check or test; `expected`: it failed as its author had declared, with a reason."""
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "expected", "skipped")
TIERS: Mapping[Tier, str] = {
    "bronze": "its class is sound, and no test of its kind's suite fails unexpectedly",
    "silver": "all tests passed or are expected to fail; it is typed, documented and lazily imported",
    "gold": "every test that ran passed; it is typed, documented and lazily imported",
    "platinum": "every test of its kind's suite ran and passed; it is typed, documented and lazily imported",
}
"""Tier → what the tier states about a plugin; the lowest tier first."""


def counts(report: Mapping[str, Any]) -> dict[Outcome, int]:
    """Return the number of a report's tests with each outcome."""
    found = Counter(test.get("outcome") for test in report.get("tests", ()))
    return {outcome: found[outcome] for outcome in OUTCOMES}


def tier(report: Mapping[str, Any]) -> Tier | None:
    """Return the quality tier of a report, computed from its results, or None below bronze."""
    told = counts(report)
    checks = Counter(check.get("outcome") for check in report.get("checks", ()))
    facts = report.get("facts", {})
    if told["failed"] or checks["failed"] or not told["passed"] or not checks["passed"]:
        return None
    if not facts or not all(fact.get("holds") for fact in facts.values()):
        return "bronze"
    if told["expected"]:
        return "silver"
    return "gold" if told["skipped"] else "platinum"


def shipped_report(entry: PluginEntry) -> Mapping[str, Any] | None:
    """Return the conformance report that a plugin's package ships, or None if it is missing or can't be read."""
    for place in package_directories(entry.target.split(":")[0].split(".")[0]):
        for report in read_reports(place / FILE_NAME):
            named = report.get("plugin", {})
            if (named.get("kind"), named.get("name")) == (entry.kind, entry.name):
                return report
    return None


def read_reports(path: Path) -> list[Mapping[str, Any]]:
    """Return the reports of a file; empty for a missing or damaged file or another schema, so that listings do not fail."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        return []
    reports = data.get("reports")
    return [r for r in reports if isinstance(r, dict)] if isinstance(reports, list) else []


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report into a file of reports, replacing an older report of the same plugin."""
    others = [old for old in read_reports(path) if _of(old) != _of(report)]
    reports = sorted([*others, report], key=_of)
    text = json.dumps({"schema": SCHEMA, "reports": reports}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def in_words(report: Mapping[str, Any], version: str) -> str:
    """Return a one-line summary of a report, for the page of a plugin with the installed version `version`."""
    told = counts(report)
    parts = [f"{told['passed']} passed"]
    words: dict[Outcome, str] = {"expected": "expected to fail"}
    parts += [f"{told[o]} {words.get(o, o)}" for o in OUTCOMES[1:] if told[o]]
    plugin, versions = report.get("plugin", {}), report.get("versions", {})
    made = f"dovetail-sdk {versions.get('dovetail-sdk', 'unknown')}"
    if plugin.get("version") != version:
        made = f"version {plugin.get('version')}, {made}"
    return f"{tier(report) or 'no tier'} ({', '.join(parts)}; {made})"


def _of(report: Mapping[str, Any]) -> tuple[str, str]:
    plugin = report.get("plugin", {})
    return str(plugin.get("kind")), str(plugin.get("name"))
