"""The section of a report about the reward: the distribution of each component, and signs of reward hacking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from dovetail.telemetry import numbers
from dovetail_diagnosis import figures
from dovetail_report import charts
from dovetail_report.summary import History

COMPONENT = "reward/components/"
"""Prefix of the metrics of components' means; a component's percentiles are `reward/component_p10/…` and `reward/component_p90/…`."""
_MOST_COMPONENTS = 12
_LAST = 4
"""Signs of reward hacking are judged over the last `1 / _LAST` of the steps."""

Judge = Callable[[Sequence[float]], str]
"""A function that takes a metric's values at all steps and returns, as text, what is suspicious about them; empty if nothing is."""


def _longer_pays(values: Sequence[float]) -> str:
    late = _late(values)
    if abs(late) <= 0.5:
        return ""
    pays = "longer" if late > 0 else "shorter"
    return f"{pays} answers to the same prompt score higher, whatever they say"


def _repeats(values: Sequence[float]) -> str:
    rises = _late(values) > 2 * fmean(values[: max(1, len(values) // _LAST)])
    return "answers repeat themselves more and more" if _late(values) > 0.2 and rises else ""


def _same(values: Sequence[float]) -> str:
    return "most answers of a group are the same" if _late(values) > 0.5 else ""


_SIGNS: tuple[tuple[figures.Figure, str, Judge], ...] = (
    (
        figures.LENGTH_CORRELATION,
        "Score against length within a group: near ±1 the length alone decides.",
        _longer_pays,
    ),
    (
        figures.REPEATED_TEXT,
        "Share of an answer's runs of four tokens that stood in it before.",
        _repeats,
    ),
    (
        figures.IDENTICAL_RESPONSES,
        "Share of answers that equal another one to their prompt: nothing to compare.",
        _same,
    ),
)


def component_cards(history: History) -> list[dict[str, Any]]:
    """Return a card for each reward component: its mean at each step, with a band from the 10th to the 90th percentile."""
    names = [name for name in history.names if name.startswith(COMPONENT)]
    return [_component(history, name) for name in names[:_MOST_COMPONENTS]]


def components_left_out(history: History) -> int:
    """Return the number of reward components without a card, because the report limits the number of cards."""
    count = sum(name.startswith(COMPONENT) for name in history.names)
    return max(0, count - _MOST_COMPONENTS)


def sign_cards(history: History) -> list[dict[str, Any]]:
    """Return a card for each measured sign of reward hacking, with a note if the values are suspicious."""
    cards = []
    for figure, meaning, judge in _SIGNS:
        steps, values = history.series(figure.metric)
        if not values:
            continue
        drawn = card(figure.label, values, figure.write)
        drawn["chart"] = charts.line_chart([charts.Line(steps, values)], style=figure.style)
        cards.append(drawn | {"meaning": meaning, "note": judge(values)})
    return cards


def _component(history: History, name: str) -> dict[str, Any]:
    part = name.removeprefix(COMPONENT)
    steps, means = history.series(name)
    low = history.series(f"reward/component_p10/{part}")
    high = history.series(f"reward/component_p90/{part}")
    banded = low[0] == high[0] == steps
    drawn = card(part, means, numbers.write_figure)
    if means:
        line = charts.Line(steps, means, *((low[1], high[1]) if banded else ()))
        drawn["chart"] = charts.line_chart([line])
    return drawn | {"note": "" if means else "never finite"}


def card(title: str, values: Sequence[float], write: Callable[[float], str]) -> dict[str, Any]:
    """Return a card without a chart: the title, and the first and the latest of the values, which `write` turns into text."""
    return {
        "title": title,
        "chart": None,
        "latest": write(values[-1]) if values else "",
        "first": write(values[0]) if len(values) > 1 else "",
        "legend": [],
        "meaning": "",
    }


def _late(values: Sequence[float]) -> float:
    """Return the mean over the last quarter of the steps."""
    return fmean(values[-max(1, len(values) // _LAST) :])
