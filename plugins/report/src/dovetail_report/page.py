"""The report: a page about a run, made from the run directory's files alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from dovetail.errors import RunDirectoryError
from dovetail.telemetry import RunDirectory, numbers, read_rows
from dovetail_diagnosis import diagnose, figures
from dovetail_report import charts, recipe
from dovetail_report.episode_section import episode_cards
from dovetail_report.marks import find_marks
from dovetail_report.reward_section import card, component_cards, components_left_out, sign_cards
from dovetail_report.samples import write_samples
from dovetail_report.summary import History, accuracy_metric, count_events, summarise
from dovetail_report.validation import EVERYTHING, source_of, validation_table

_CHARTS = (
    figures.REWARD,
    figures.ACCURACY,
    figures.SCORE,
    figures.LOSS,
    figures.KL,
    figures.LENGTH,
    figures.CUT_RESPONSES,
    figures.STALENESS,
    figures.ZERO_SIGNAL_GROUPS,
    figures.ENTROPY,
    figures.GRAD_NORM,
    figures.LEARNING_RATE,
    figures.PROBABILITY_DIFFERENCE,
    figures.WEIGHT_CHECK,
    figures.PEAK_MEMORY,
    figures.RESERVED_MEMORY,
    figures.HOST_MEMORY,
    figures.VALUE_LOSS,
    figures.EXPLAINED_VARIANCE,
    figures.KEPT_GROUPS,
    figures.ROUNDS,
)
_CLIP_SHARES = re.compile(r"\w+/\w*clip\w*_frac\w*")
_BESIDE_STEPS = {"step", "validation", "checkpoint", "checkpoint_blocking"}
"""Phases that are not part of a step's time."""
_COMPLAINTS_SHOWN = 20
_WARNINGS_SHOWN = 12
"""Maximum number of warnings that the page shows: the latest of the run."""


def write_report(run_directory: str | os.PathLike[str]) -> Path:
    """Write `report.html` and the folder `report` into a run directory and return the path of the page.

    The page needs no network and loads the samples from the folder `report`. Sections whose files are missing or damaged are left out of
    the page.
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
    scripts = "".join(
        (Path(__file__).parent / name).read_text("utf-8") for name in ("charts.js", "samples.js")
    )
    page = environment.get_template("report.html.jinja").render(
        **_content(directory), scripts=scripts
    )
    return RunDirectory(directory).write_text("report.html", page)


def _content(directory: Path) -> dict[str, Any]:
    """Return the variables of the page's template."""
    rows = read_rows(directory / "metrics.jsonl")
    events = read_rows(directory / "events.jsonl")
    history = History(rows)
    known = _known(_read_json(directory / "summary.json"))
    last = max(history.steps, default=0)
    steps = known.get("steps", last)
    if not numbers.is_number(steps) or steps < last or known.get("status") in (None, "running"):
        # There is no summary, or it is older than the run's resumption.
        known["status"] = "running" if RunDirectory(directory).under_way else "killed"
        known.pop("steps", None)
    summary = {**summarise(directory, history), **known}
    metric = accuracy_metric(directory, history)
    config = _read_text(directory / "config.yaml")
    key_figures = _key_figures(directory)
    shown = [figures.key_figure(name, better) for name, better in key_figures.items()]
    shown += [figure for figure in _CHARTS if figure.metric not in key_figures]
    scored = "actor/updates" not in history.names or "reward/failures" in history.names
    warnings = diagnose(rows).warnings
    charts_of = {
        "charts": [
            _chart(history, figure, metric)
            for figure in shown
            if history.find(figure) is not None
            or (figure.always and scored and not figure.outdone(history.names))
        ],
        "components": component_cards(history),
        "signs": sign_cards(history),
        "episodes": episode_cards(history),
        "phases": _phases(history),
    }
    charts_of["charts"] += _clip_shares(history)
    drawn: list[dict[str, Any]] = []
    for each in (each for cards in charts_of.values() for each in cards):
        if each["chart"] is not None:
            each["number"] = len(drawn)
            drawn.append(each["chart"] | {"title": each["title"]})
    samples = write_samples(directory)
    marks = find_marks(warnings, events)
    return {
        "title": "/".join(directory.resolve().parts[-2:]),
        "status": str(summary.get("status")),
        "algorithm": recipe.algorithm_line(config),
        "best": _best(summary.get("best")),
        "warnings": warnings[-_WARNINGS_SHOWN:],
        "more_warnings": max(0, len(warnings) - _WARNINGS_SHOWN),
        "headline": _headline(summary, history, key_figures),
        "tiles": _tiles(summary),
        **charts_of,
        # Escaped, since only text that begins with < can end a script element.
        "data": json.dumps({"charts": drawn, "marks": marks}).replace("<", "\\u003c"),
        "marks": marks,
        "plus_minus": figures.PLUS_MINUS,
        "validation": validation_table(history),
        "more_components": components_left_out(history),
        "failures": _failures(events, history, read_rows(directory / "restarts.jsonl")),
        "samples": samples,
        "config": recipe.without_critic(config) if _trained_no_critic(history) else config,
        "plugins": recipe.plugin_table(_read_json(directory / "plugins.lock.json")),
        "directory": str(directory),
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
    }


def _known(summary: object) -> dict[str, Any]:
    """Return the entries of `summary.json` without null values, which must not hide values from the metrics."""
    entries = summary.items() if isinstance(summary, dict) else ()
    return {name: value for name, value in entries if value is not None}


def _trained_no_critic(history: History) -> bool:
    """Return whether steps were logged, and none of them had a critic."""
    trained = any(name in history.names for name in ("reward/mean", "actor/updates"))
    return trained and not any(name.startswith("critic/") for name in history.names)


def _best(best: Any) -> dict[str, str] | None:
    """Return text and path of the best checkpoint; None if none is marked."""
    text = figures.write_best(best)
    return {"text": text, "path": str(best.get("path", ""))} if text else None


def _rewards_label(summary: Mapping[str, Any]) -> str:
    """Return the label of the first and last rewards, which are of single steps, or means over several steps."""
    steps = summary.get("reward_steps", 1)
    many = f"Mean reward, first {steps} steps → last {steps}"
    return "Mean reward, first step → last" if steps == 1 else many


def _key_figures(directory: Path) -> dict[str, str]:
    """Return the metrics that the run's plan names as key figures, each with its better direction, `up` or `down`."""
    plan = _read_json(directory / "plan.json")
    named = plan.get("key_figures") if isinstance(plan, dict) else None
    return named if isinstance(named, dict) else {}


def _headline(
    summary: Mapping[str, Any], history: History, key_figures: Mapping[str, str]
) -> dict[str, str] | None:
    """Return the run's main metric, before and after: validation accuracy or score, else the reward, else a key figure; None if unknown."""
    if "reward/mean" not in key_figures and "accuracy_before" not in summary:
        rows = [history.at(step) for step in history.steps]
        ends = numbers.before_and_after(rows, key_figures)
        for name in sorted(ends, key=lambda name: not name.startswith("val/")):
            figure = figures.key_figure(name, key_figures[name])
            start, end = (float(ends[name][place]) for place in ("before", "after"))
            better = (end > start) == (figure.better == "up")
            return {
                "label": f"{figure.title}, before → after",
                "before": figure.write(start),
                "after": figure.write(end),
                "direction": "level" if end == start else "up" if better else "down",
            }
    metric = summary.get("accuracy_metric")
    figure = figures.validation_figure(metric)
    accuracy = figure.label_for(metric)
    pairs = (
        (f"{accuracy}, before → after", "accuracy_before", "accuracy_after", figure.style),
        (_rewards_label(summary), "reward_first", "reward_last", "number"),
    )
    # A single step has no change of the reward.
    for label, first, last, style in pairs[:1] if summary.get("steps") == 1 else pairs:
        before, after = summary.get(first), summary.get(last)
        if numbers.is_number(before) and numbers.is_number(after):
            return {
                "label": label,
                "before": numbers.write_figure(before, style),
                "after": numbers.write_figure(after, style),
                "direction": "up" if after > before else "down" if after < before else "level",
            }
    return None


def _tiles(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the numbers that the page shows next to its headline, such as steps, training time and seed, as (label, text)."""
    steps = summary.get("steps")
    total = summary.get("total_steps")
    known = [("Steps", f"{steps} of {total}" if total and total != steps else str(steps))]
    for label, name, style in (
        (_rewards_label(summary), "", ""),
        ("Training time", "train_seconds", "seconds"),
        ("Seconds a step", "seconds_per_step", "seconds"),
        ("Tokens a second", "tokens_per_second", "length"),
        ("Failed rewards", "reward_failures", "length"),
        ("Seed", "seed", "length"),
    ):
        value = summary.get(name)
        if numbers.is_number(value):
            known.append((label, numbers.write_figure(float(value), style)))
        elif not name and numbers.is_number(summary.get("reward_last")):
            ends = [numbers.write_figure(summary[key]) for key in ("reward_first", "reward_last")]
            one = ("Mean reward", ends[-1])
            known.append(one if steps == 1 else (label, " → ".join(ends)))
    return known


def _chart(history: History, figure: figures.Figure, metric: str | None) -> dict[str, Any]:
    """Return a card with title, latest value, chart and legend; the chart is None if nothing was logged.

    `metric` is the validation metric by which the run is judged; None without validation.
    """
    if figure is figures.KL and not history.values(figure) and history.values(figures.POLICY_KL):
        figure = figures.POLICY_KL
    validation = figure in (figures.ACCURACY, figures.SCORE)
    judged = validation and metric and figures.validation_figure(metric) is figure
    names = [metric if judged else history.find(figure)]
    legend: list[str] = []
    if validation:
        kind = "acc" if figure is figures.ACCURACY else "mean"
        sources = [name for name in history.names if source_of(name, kind) is not None]
        if len(sources) > 1:
            legend = [EVERYTHING] if names[0] else []
            legend += [source_of(name, kind) or "" for name in sources]
            names = [name for name in (*names, *sources) if name]
    unit = numbers.GIB if figure.style == "gib" else 1
    series = [history.series(name) for name in names]
    values = series[0][1]
    drawn = card(figure.label_for(names[0]), [], str) | {"note": ""}
    gaps = history.not_finite.get(names[0] or "", [])
    if gaps:
        drawn["note"] = f"not finite at step{'' if len(gaps) == 1 else 's'} {_ranges(gaps)}"
    if not values:
        return drawn
    percent = figure.style == "percent" and all(0 <= v <= 1 for _, vs in series for v in vs)
    drawn["chart"] = charts.line_chart(
        [
            charts.Line(steps, [v / unit for v in points], *ends, label)
            for name, label, (steps, points) in zip(names, legend or [""], series, strict=True)
            if points
            for ends in [_ends(history, name, steps, only=len(names) == 1)]
        ],
        style="percent" if percent else "number" if figure.style == "gib" else figure.style,
        markers=(validation or figure.metric.startswith("val/")) and len(values) <= 60,
    )
    if figure.metric == figures.REWARD.metric and drawn["chart"]["lines"][0].get("low"):
        drawn["meaning"] = "The band is from the 10th to the 90th percentile of a step's samples."
    drawn["latest"] = figure.read(history.at(series[0][0][-1]), names[0])
    drawn["first"] = figure.write(values[0]) if len(values) > 1 else ""
    drawn["legend"] = list(enumerate(legend, start=1))
    return drawn


def _clip_shares(history: History) -> list[dict[str, Any]]:
    """Return a card with the shares of tokens that losses clipped; empty if no loss clips."""
    names = [name for name in history.names if _CLIP_SHARES.fullmatch(name)][
        : charts.SERIES_COLOURS
    ]
    lines = [charts.Line(*history.series(name), name=name) for name in names]
    if not any(line.values for line in lines):
        return []
    drawn = card("Clipped tokens", [], str)
    drawn["chart"] = charts.line_chart([line for line in lines if line.values], style="percent")
    return [drawn | {"legend": list(enumerate(names, start=1)), "note": ""}]


def _ends(
    history: History, name: str | None, steps: Sequence[int], *, only: bool
) -> tuple[list[float] | None, list[float] | None]:
    """Return the lower and upper edges of a metric's band: at each step, its 95% interval, or the reward's 10th and 90th percentiles.

    Both are None if a step has no interval, or if the chart has further lines (`only` is False), whose bands would overlap.
    """
    ends = (
        ("reward/p10", "reward/p90")
        if name == figures.REWARD.metric
        else (f"{name}/low", f"{name}/high")
    )
    low, high = map(history.series, ends)
    return (low[1], high[1]) if only and low[0] == high[0] == list(steps) else (None, None)


def _phases(history: History) -> list[dict[str, Any]]:
    """Return a card with a chart of each step's time by phase, and each phase's mean seconds and share; empty without phases."""
    phases = [
        name.removeprefix("time/")
        for name in history.names
        if name.startswith("time/") and name.count("/") == 1
    ]
    parts = [phase for phase in phases if phase not in _BESIDE_STEPS]
    steps = [step for step in history.steps if "time/step" in history.at(step)]
    if not steps or not parts:
        return []
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
        (colour, part, numbers.write_seconds(fmean(column)), f"{100 * sum(column) / total:.0f}%")
        for colour, (part, column) in zip(colours, values.items(), strict=True)
    ]
    return [
        {
            "title": "Seconds a step by phase",
            "chart": charts.stacked_chart(steps, values),
            "rows": rows,
            "mean": numbers.write_seconds(fmean(whole)),
        }
    ]


def _failures(
    events: Sequence[Mapping[str, Any]], history: History, restarts: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, int]]:
    """Return failed rewards, metrics that were not finite, restarts, and the most frequent warnings and errors, as (kind, text, count)."""
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
        for name, steps in history.not_finite.items()
    ]
    rows += [
        ("restart", f"{row.get('cause')}; {row.get('repeated')} steps repeated", 1)
        for row in restarts
    ]
    return rows + count_events(events)[:_COMPLAINTS_SHOWN]


def _ranges(steps: Sequence[int]) -> str:
    """Return steps as a short text, such as `3–5, 9`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return ", ".join(texts[:6]) + (f" and {len(texts) - 6} more" if len(texts) > 6 else "")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_json(path: Path) -> Any:
    """Return the file's content; None if the file is missing or incomplete, as in a killed run."""
    try:
        return RunDirectory(path.parent).read_json(path.name)
    except RunDirectoryError:
        return None
