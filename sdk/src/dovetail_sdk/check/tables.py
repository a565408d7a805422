"""Printed reports: one plugin in detail, or a line for each of many plugins."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click

from dovetail.cli import render
from dovetail.plugins.entry import PluginEntry
from dovetail_console.conformance_report import OUTCOMES, TIERS, counts

_LONGEST = 80
"""Maximum characters of a setting's printed value; the rest is cut off."""
_COLOURS = {"passed": "green", "failed": "red", "expected": "yellow", "skipped": "cyan"}
_TITLES = ("PLUGIN", "TIER", *(outcome.upper() for outcome in OUTCOMES), "SECONDS")


def failed(report: dict[str, Any]) -> bool:
    """Return whether a check or a test of a report failed."""
    return any(item["outcome"] == "failed" for item in _items(report))


def print_report(report: dict[str, Any]) -> None:
    """Print a report: a table of checks and tests, the reasons of those that failed or were skipped, and a summary."""
    plugin = report["plugin"]
    render.line(
        f"{_name(report)} of {plugin['distribution']} {plugin['version']}, "
        f"interface {report['interface']['range'] or 'unknown'} (here: {report['interface']['version']})\n"
    )
    rows = [(item["outcome"], item["name"], "") for item in report["checks"]]
    rows += [(t["outcome"], t["name"], f"{t['seconds']:.2f} s") for t in report["tests"]]
    render.table(("OUTCOME", "CHECK OR TEST", "TIME"), rows)
    _print_settings(report)
    _print_reasons(report)
    ended = counts(report)
    summary = ", ".join(f"{ended[outcome]} {outcome}" for outcome in OUTCOMES if ended[outcome])
    tier = report["tier"]
    earned = f"{tier}: {TIERS[tier]}" if tier else "no tier"
    render.line(f"\n{summary or 'no test ran'} in {report['seconds']:.1f} s; {earned}")


def _print_settings(report: dict[str, Any]) -> None:
    """Print what the plugin's author has set in each suite (see `settings_of`); nothing for suites with the defaults."""
    for suite, settings in report["settings"].items():
        config = settings.get("config")
        own = [f"{key}={_short(value)}" for key, value in (config or {}).items()]
        own += ["a config that its tests make"] if config is None else []
        own += [f"{key} = {_short(value)}" for key, value in settings.items() if key != "config"]
        if own:
            render.line(f"\n{suite} ran with {', '.join(own)}")


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


class ReportTable:
    """A table with one line per plugin, each printed when the plugin's report is ready; failures and totals follow at the end."""

    def __init__(self, entries: Iterable[PluginEntry]) -> None:
        self._width = max(len(f"{entry.kind}/{entry.name}") for entry in entries)
        self._reports: list[dict[str, Any]] = []
        self._line(_TITLES)

    def add(self, report: dict[str, Any]) -> None:
        """Print the table's line for a report."""
        self._reports.append(report)
        ended = counts(report)
        if failed(report):
            tier = "failed"
        elif report["not_run"]:
            tier = "not run"
        else:
            tier = report["tier"] or "none"
        numbers = [str(ended[outcome] or "-") for outcome in OUTCOMES]
        self._line((_name(report), tier, *numbers, f"{report['seconds']:.1f}"))

    def finish(self) -> None:
        """Print the failures, skip reasons and totals below the table."""
        for report in self._reports:
            if failed(report):
                render.line(f"\n{_name(report)}", bold=True)
                _print_reasons(report, ("failed",))
        reasons: dict[str, list[str]] = {}
        for report in self._reports:
            if report["not_run"]:
                reasons.setdefault(f"not run: {report['not_run']}", []).append(_name(report))
            for test in report["tests"]:
                if test["outcome"] in ("skipped", "expected"):
                    names = reasons.setdefault(f"{test['outcome']}: {test['reason']}", [])
                    names += [_name(report)] if _name(report) not in names else []
        if reasons:
            render.line()
        for reason, names in reasons.items():
            render.line(f"{reason} ({', '.join(names)})")
        bad = sum(map(failed, self._reports))
        tests = sum(len(report["tests"]) for report in self._reports)
        seconds = sum(report["seconds"] for report in self._reports)
        render.line(
            f"\n{len(self._reports)} plugins, {bad} failed; {tests} tests in {seconds:.1f} s"
        )

    def _line(self, cells: Sequence[str]) -> None:
        widths = (self._width, 8, *(len(title) for title in _TITLES[2:]))
        text = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        render.line(text.rstrip())


def _print_reasons(
    report: dict[str, Any], outcomes: Sequence[str] = ("failed", "expected", "skipped")
) -> None:
    """Print the checks and tests with one of these outcomes, grouped by reason; then the unmet conditions of the tier (facts), and why the
    suite was not run, if so.
    """
    for outcome in outcomes:
        reasons: dict[tuple[str, str | None], list[str]] = {}
        for item in _items(report):
            if item["outcome"] == outcome:
                text = item.get("message") or item.get("reason") or "no reason given"
                reasons.setdefault((text, item.get("hint")), []).append(item["name"])
        for (text, hint), names in reasons.items():
            label = click.style(f"\n{outcome} ", fg=_COLOURS[outcome], bold=True)
            render.line(f"{', '.join(names)}: {text}", label=label)
            if hint:
                render.line(f"  → {hint}")
    for name, fact in report["facts"].items():
        if not fact["holds"]:
            render.line(f"\nnot {name}: {fact['reason']}")
    if report["not_run"]:
        render.line(f"\nthe suite was not run: {report['not_run']}")


def _items(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [*report["checks"], *report["tests"]]


def _name(report: dict[str, Any]) -> str:
    return f"{report['plugin']['kind']}/{report['plugin']['name']}"
