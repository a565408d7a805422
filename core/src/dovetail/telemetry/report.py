"""The report: one self-contained page about a run, made from the run directory's files alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeGuard

from dovetail.telemetry import charts, figures
from dovetail.telemetry.samples import read_samples, sample_steps
from dovetail.telemetry.summary import History, count_events, summarise
from dovetail.telemetry.validation import EVERYTHING, source_of, validation_table

_CHARTS = (
    figures.REWARD,
    figures.ACCURACY,
    figures.KL,
    figures.LENGTH,
    figures.ENTROPY,
    figures.GRAD_NORM,
)
_BESIDE_STEPS = {"step", "validation", "checkpoint"}
"""Phases that are no part of a step's own time."""
_SAMPLES_SHOWN = 4
_COMPLAINTS_SHOWN = 20
_LONGEST_TEXT = 4000
"""Characters of a prompt or response that are shown."""


def write_report(run_directory: str | os.PathLike[str]) -> Path:
    """Write `report.html` into a run directory and return its path.

    The page holds everything itself and needs no network. Files that are missing or torn leave their
    part of the page out.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    directory = Path(run_directory)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.jinja").render(**_content(directory))
    target = directory / "report.html"
    temporary = directory / f".report.html.{os.getpid()}.tmp"
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(target)
    return target


def _content(directory: Path) -> dict[str, Any]:
    """What the template shows."""
    history = History.read(directory)
    summary = {**summarise(directory), **_known(_read_json(directory / "summary.json"))}
    return {
        "title": "/".join(directory.resolve().parts[-2:]),
        "status": str(summary.get("status", "unfinished")),
        "headline": _headline(summary),
        "tiles": _tiles(summary),
        "charts": [_chart(history, figure) for figure in _CHARTS],
        "validation": validation_table(history),
        "phases": _phases(history),
        "failures": _failures(directory, history),
        "samples": _samples(directory),
        "config": _read_text(directory / "config.yaml"),
        "plugins": _plugins(_read_json(directory / "plugins.lock.json")),
        "directory": str(directory),
    }


def _known(summary: Any) -> dict[str, Any]:
    """What `summary.json` tells; entries that it leaves open do not hide what the metrics tell."""
    entries = summary.items() if isinstance(summary, dict) else ()
    return {name: value for name, value in entries if value is not None}


def _headline(summary: Mapping[str, Any]) -> dict[str, str] | None:
    """The result in one line: accuracy before and after, or else the reward's rise."""
    pairs = (
        ("Validation accuracy", "accuracy_before", "accuracy_after", "percent"),
        ("Reward", "reward_first", "reward_last", "number"),
    )
    for label, first, last, style in pairs:
        before, after = summary.get(first), summary.get(last)
        if _is_number(before) and _is_number(after):
            return {
                "label": label,
                "before": figures.write_figure(before, style),
                "after": figures.write_figure(after, style),
                "direction": "up" if after > before else "down" if after < before else "level",
            }
    return None


def _tiles(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Further figures as (label, text)."""
    steps = summary.get("steps")
    total = summary.get("total_steps")
    known = [("Steps", f"{steps} of {total}" if total and total != steps else str(steps))]
    for label, name, style in (
        ("Reward, first → last", "", ""),
        ("Training time", "train_seconds", "seconds"),
        ("Seconds a step", "seconds_per_step", "seconds"),
        ("Tokens a second", "tokens_per_second", "length"),
        ("Failed rewards", "reward_failures", "length"),
        ("Seed", "seed", "length"),
    ):
        value = summary.get(name)
        if _is_number(value):
            known.append((label, figures.write_figure(float(value), style)))
        elif not name and _is_number(summary.get("reward_last")):
            ends = (summary["reward_first"], summary["reward_last"])
            known.append((label, " → ".join(figures.write_figure(end) for end in ends)))
    return known


def _chart(history: History, figure: figures.Figure) -> dict[str, Any]:
    """A card: title, latest value, drawing, legend; the drawing is None where nothing was logged."""
    if figure is figures.KL and not history.values(figure) and history.values(figures.POLICY_KL):
        figure = figures.POLICY_KL
    names = [figure.find(history.names)]
    legend: list[str] = []
    sources = [name for name in history.names if source_of(name) is not None]
    if figure is figures.ACCURACY and len(sources) > 1:
        names = [name for name in (*names, *sources) if name]
        legend = [EVERYTHING, *(source_of(name) or "" for name in sources)]
    series = [history.series(name) for name in names]
    values = series[0][1]
    card: dict[str, Any] = {
        "title": figure.label,
        "svg": None,
        "latest": "",
        "first": "",
        "legend": [],
        "note": "",
    }
    gaps = history.not_finite().get(names[0] or "", [])
    if gaps:
        card["note"] = f"not finite at step{'' if len(gaps) == 1 else 's'} {_ranges(gaps)}"
    if not values:
        return card
    percent = figure.style == "percent" and all(0 <= v <= 1 for _, vs in series for v in vs)
    card["svg"] = charts.line_chart(
        figure.label,
        [
            charts.Line(steps, points, *_ends(history, name, steps, only=len(names) == 1))
            for name, (steps, points) in zip(names, series, strict=True)
            if points
        ],
        percent=percent,
        markers=figure is figures.ACCURACY and len(values) <= 60,
    )
    card["latest"] = figure.read(history.at(series[0][0][-1]))
    card["first"] = figure.write(values[0])
    card["legend"] = list(enumerate(legend, start=1))
    return card


def _ends(
    history: History, name: str | None, steps: Sequence[int], *, only: bool
) -> tuple[list[float], list[float]] | tuple[()]:
    """Lower and upper ends of a figure's interval; nothing where a step has none, or several lines would overlap."""
    low, high = (history.series(f"{name}/{end}") for end in ("low", "high"))
    return (low[1], high[1]) if only and low[0] == high[0] == list(steps) else ()


def _phases(history: History) -> dict[str, Any] | None:
    """The time of each phase of a step: a stacked chart, and for each phase its mean seconds and share."""
    phases = [
        name.removeprefix("time/")
        for name in history.names
        if name.startswith("time/") and name.count("/") == 1
    ]
    parts = [phase for phase in phases if phase not in _BESIDE_STEPS]
    steps = [step for step in history.steps if "time/step" in history.at(step)]
    if not steps or not parts:
        return None
    values = {
        part: charts.finite([history.at(step).get(f"time/{part}") for step in steps])
        for part in parts
    }
    values = dict(sorted(values.items(), key=lambda item: -sum(item[1])))
    if len(values) >= charts.SERIES_COLOURS:
        largest = list(values.items())[: charts.SERIES_COLOURS - 1]
        values = dict(largest)
    whole = charts.finite([history.at(step)["time/step"] for step in steps])
    covered = [sum(column) for column in zip(*values.values(), strict=True)]
    values["other"] = [max(0.0, all_ - part) for all_, part in zip(whole, covered, strict=True)]
    total = sum(sum(column) for column in values.values()) or 1.0
    colours = [*range(1, len(values)), charts.SERIES_COLOURS]
    rows = [
        (colour, part, figures.write_seconds(fmean(column)), f"{100 * sum(column) / total:.0f}%")
        for colour, (part, column) in zip(colours, values.items(), strict=True)
    ]
    svg = charts.stacked_chart("Seconds a step by phase", steps, values)
    return {"svg": svg, "rows": rows, "mean": figures.write_seconds(fmean(whole))}


def _failures(directory: Path, history: History) -> list[tuple[str, str, int]]:
    """What went wrong, counted: (where, what, how often)."""
    rows = []
    for name in history.names:
        if name.startswith("reward/failures/"):
            count = int(sum(history.series(name)[1]))
            if count:
                rows.append(("reward", name.removeprefix("reward/failures/"), count))
    if not rows and (count := int(sum(history.values(figures.FAILURES)))):
        rows.append(("reward", "samples without a score", count))
    rows += [
        ("figure", f"{name} not finite at {_ranges(steps)}", len(steps))
        for name, steps in history.not_finite().items()
    ]
    return rows + count_events(directory)[:_COMPLAINTS_SHOWN]


def _samples(directory: Path) -> list[dict[str, Any]]:
    """Samples of the first and the last step that have some."""
    steps = sample_steps(directory)
    shown = []
    for label, step in (("Early", steps[0]), ("Late", steps[-1])) if steps else ():
        rows = _of_different_prompts(read_samples(directory, step))
        shown.append({"label": label, "step": step, "rows": [_sample(row) for row in rows]})
    return shown[:1] if len(steps) == 1 else shown


def _of_different_prompts(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A few rows, one a prompt as far as there are prompts."""
    first: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        first.setdefault(_text(row.get("prompt")), row)
    chosen = list(first.values())[:_SAMPLES_SHOWN]
    rest = [row for row in rows if all(row is not other for other in chosen)]
    return chosen + rest[: _SAMPLES_SHOWN - len(chosen)]


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    score = row.get("score")
    failure = row.get("failure")
    if isinstance(failure, Mapping):
        failure = f"{failure.get('kind', 'failed')}: {failure.get('message', '')}"
    return {
        "prompt": _shorten(_text(row.get("prompt"))),
        "response": _shorten(_text(row.get("response"))),
        "score": f"{score:.3g}" if _is_number(score) else "none",
        "good": _is_number(score) and score > 0,
        "failure": str(failure) if failure else "",
        "truth": _shorten(_text(row.get("ground_truth"))),
    }


def _text(value: Any) -> str:
    """A prompt as text: messages with their roles, a string as it is."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        parts = [(item.get("role", ""), _text(item.get("content"))) for item in value]
        if len(parts) == 1:
            return str(parts[0][1])
        return "\n".join(f"{role}: {content}" for role, content in parts)
    return json.dumps(value, ensure_ascii=False)


def _shorten(text: str) -> str:
    cut = len(text) - _LONGEST_TEXT
    return text if cut <= 0 else f"{text[:_LONGEST_TEXT]} … ({cut} more characters)"


def _plugins(lock: Any) -> dict[str, Any] | None:
    """The plugin lock as a table; None where there is none."""
    entries = lock.get("plugins") if isinstance(lock, dict) else lock
    if isinstance(entries, dict):
        entries = [
            {"name": name, **(entry if isinstance(entry, dict) else {"version": entry})}
            for name, entry in entries.items()
        ]
    rows = [entry for entry in entries or [] if isinstance(entry, dict)]
    names = [
        name
        for name in ("kind", "name", "distribution", "version", "api", "path")
        if any(row.get(name) for row in rows)
    ]
    if not names:
        return None
    return {"columns": names, "rows": [[row.get(name) or "" for name in names] for row in rows]}


def _ranges(steps: Sequence[int]) -> str:
    """Steps in few characters: 3–5, 9."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return ", ".join(texts[:6]) + (f" and {len(texts) - 6} more" if len(texts) > 6 else "")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_json(path: Path) -> Any:
    """The file's content; None where it is missing or torn, since a report of a killed run is wanted too."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
