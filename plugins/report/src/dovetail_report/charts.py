"""Curves of a run as data. The page draws them, zooms in them, and adapts them to the window's width and colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dovetail_diagnosis import figures

SERIES_COLOURS = 8
"""Number of colours for the lines of a chart in the page's stylesheet: `--series-1` to `--series-8`."""
_POINTS = 1000
"""Maximum points of a line. A longer line is divided into equal sections, and drawn as the sections' means. If the line has no
interval, a band shows each section's smallest and largest value."""


@dataclass(frozen=True)
class Line:
    """One line of a chart: finite values at ascending steps."""

    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] | None = None
    """Lower ends of an interval around each value, drawn as a band; None if the values have no interval."""
    high: Sequence[float] | None = None
    """Upper ends of the interval."""
    name: str = ""


def line_chart(
    lines: Sequence[Line], *, style: str = "number", markers: bool = False
) -> dict[str, Any]:
    """Return a chart of lines over steps, as JSON values.

    Args:
        lines: the lines, with at least one value altogether.
        style: the format of values; see `figures.Figure.style`.
        markers: whether to mark the points, for series with few points.
    """
    return {"lines": [_line(line) for line in lines], "style": style, "markers": markers}


def stacked_chart(steps: Sequence[float], parts: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return a chart of the seconds of each step, stacked by part of the step, as JSON values.

    Args:
        steps: the steps, ascending.
        parts: the parts' values, one per step; drawn from bottom to top in this order, the last part in grey.
    """
    lines = [_line(Line(steps, values, name=name), band=False) for name, values in parts.items()]
    return {"lines": lines, "style": "seconds", "markers": False, "stacked": True}


def _line(line: Line, *, band: bool = True) -> dict[str, Any]:
    many, low, high = len(line.values) > _POINTS, line.low, line.high
    if many and band and (low is None or high is None):
        edges = [round(i * len(line.values) / _POINTS) for i in range(_POINTS + 1)]
        low, high = ([pick(line.values[a:b]) for a, b in pairwise(edges)] for pick in (min, max))
    columns = {"x": line.steps, "y": line.values, "low": low, "high": high}
    short = {
        key: [_rounded(value) for value in figures.bucket_means(column, _POINTS)]
        for key, column in columns.items()
        if column is not None
    }
    return {"name": line.name, **short}


def _rounded(value: float) -> float:
    # Bounded, since the mean of values near the largest float may be infinite, and JSON has no infinity.
    return float(f"{max(-1e300, min(1e300, value)):.6g}")


def finite(values: Sequence[float | None]) -> list[float]:
    """Return the values with 0 in place of absent or non-finite values, so that they can be stacked."""
    return [value if value is not None and math.isfinite(value) else 0.0 for value in values]
