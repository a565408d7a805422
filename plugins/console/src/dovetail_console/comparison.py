"""Differences between runs: keys of their configs, and their curves on shared axes as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dovetail.config import read_file
from dovetail.telemetry import RunDirectory, numbers, read_rows
from dovetail_console.run_overview import overview, read_or_none
from dovetail_diagnosis import figures

_IDENTITY = {"project", "experiment", "output_dir"}
_COLOURS = ("#2f6fde", "#e07b39", "#2a9d78", "#8a63d2", "#c9a227", "#d1527f", "#4aa3c7", "#7c8798")
_WIDTH, _HEIGHT, _POINTS = 560, 200, 400
_STYLE = """body{margin:0 auto;max-width:1200px;padding:32px 24px;font:15px/1.5 system-ui,sans-serif;color:#1c2430;background:#f6f7f9}
section{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:14px}
figure,div{margin:0;background:#fff;border:1px solid #e4e7ec;border-radius:12px;padding:14px 18px;min-width:0;overflow-x:auto}
svg{width:100%;height:auto}svg text{font-size:11px;fill:#667085}table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:5px 16px 5px 0;border-bottom:1px solid #e4e7ec;overflow-wrap:break-word}th{color:#667085;font-weight:500}
h1{font-size:24px}h2{font-size:17px;margin:32px 0 12px}i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}"""


def differences(paths: Sequence[Path]) -> dict[str, list[Any]]:
    """Return the keys whose values differ between the configs of runs, each with its value in every run (None if not set)."""
    leaves = [
        _leaves(read_or_none(lambda p=path: read_file(p / "config.yaml").tree) or {})  # type: ignore[misc]
        for path in paths
    ]
    keys = dict.fromkeys(key for each in leaves for key in each)
    found = {key: [each.get(key) for each in leaves] for key in keys if key not in _IDENTITY}
    return {key: values for key, values in found.items() if any(v != values[0] for v in values)}


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    inner = (_leaves(v, f"{path}.{k}" if path else str(k)) for k, v in value.items())
    return {key: leaf for each in inner for key, leaf in each.items()}


def page(paths: Sequence[Path], names: Sequence[str]) -> str:
    """Return a self-contained HTML page: a table of the runs, the differences of their configs, and a chart of each metric over all runs.

    Args:
        paths: run directories.
        names: the display name of each run.
    """
    rows = [read_or_none(lambda p=path: read_rows(RunDirectory(p).metrics)) or [] for path in paths]  # type: ignore[misc]
    swatches = [
        f'<i style="background:{_colour(n)}"></i>{escape(name)}' for n, name in enumerate(names)
    ]
    views = [overview(path) for path in paths]
    shown: dict[str, None] = {}
    for view in views:
        shown.update(dict.fromkeys(view["figures"]))
    shown.update(dict.fromkeys(f.metric for f in figures.KEY_FIGURES if not f.pattern))
    charts = [_chart(metric, rows) for metric in shown]
    runs = [
        [
            swatch,
            view["state"],
            str(view["step"]),
            *(_ends(view, metric) for metric in views[0]["figures"]),
            _causes(view),
        ]
        for swatch, view in zip(swatches, views, strict=True)
    ]
    head = ["Run", "State", "Steps", *views[0]["figures"], "Warnings"]
    changed = [
        [escape(key), *(escape(str(value)) for value in values)]
        for key, values in differences(paths).items()
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(', '.join(names))}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{len(paths)} runs compared</h1><div>{_table([escape(h) for h in head], runs)}</div>"
        f"<h2>Curves</h2><section>{''.join(charts)}</section>"
        f"<h2>Differences of the configs</h2><div>{_table(['Key', *swatches], changed)}</div></body></html>"
    )


def _ends(view: Mapping[str, Any], metric: str) -> str:
    ends = view["figures"].get(metric)
    return "" if ends is None else f"{ends['before']:.4g} → {ends['after']:.4g}"


def _causes(view: Mapping[str, Any]) -> str:
    return escape("; ".join(f"{w['name']} since step {w['since']}" for w in view["warnings"]))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [("th", head), *(("td", row) for row in rows)]
    return (
        "<table>"
        + "".join(
            f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"
            for tag, cells in lines
        )
        + "</table>"
    )


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _chart(metric: str, runs: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Draw one metric of all runs over steps; empty if no run logged it."""
    lines = []
    for rows in runs:
        points = [
            (r["step"], r[metric])
            for r in rows
            if numbers.is_number(r.get(metric)) and numbers.is_number(r.get("step"))
        ]
        steps, values = ([p[i] for p in points] for i in (0, 1))
        lines.append(
            [
                *zip(
                    figures.bucket_means(steps, _POINTS),
                    figures.bucket_means(values, _POINTS),
                    strict=True,
                )
            ]
        )
    every = [point for line in lines for point in line]
    if not every:
        return ""
    (left, right), (low, high) = (
        (min(p[i] for p in every), max(p[i] for p in every)) for i in (0, 1)
    )
    wide, tall = right - left or 1, high - low or 1
    drawn = ""
    for number, line in enumerate(lines):
        places = [
            (60 + (x - left) / wide * (_WIDTH - 70), 8 + (high - y) / tall * (_HEIGHT - 34))
            for x, y in line
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dots = "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_colour(number)}"/>'
            for x, y in places[:: max(1, len(places) // 30)]
        )
        drawn += f'<polyline points="{path}" fill="none" stroke="{_colour(number)}" stroke-width="1.8"/>{dots if len(places) <= 30 else ""}'
    labels = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'
        for x, y, anchor, text in (
            (54, 14, "end", numbers.write_figure(high)),
            (54, _HEIGHT - 22, "end", numbers.write_figure(low)),
            (60, _HEIGHT - 6, "start", f"step {left:g}"),
            (_WIDTH - 10, _HEIGHT - 6, "end", f"{right:g}"),
        )
    )
    return (
        f'<figure><h3>{escape(metric)}</h3><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(metric)}">'
        f"{drawn}{labels}</svg></figure>"
    )
