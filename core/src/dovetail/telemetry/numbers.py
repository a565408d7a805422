"""Numbers that a run logs, as short text; and the first and last values of a metric."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TypeGuard

_SHARE = re.compile(r"val/(?:.+/)?(?:acc|pass)@\d+(?:/(?:low|high))?", re.DOTALL)
"""Pattern of metrics that are shares of the samples or prompts, and are written in percent."""
GIB = 2**30
"""Bytes in a GiB."""


def before_and_after(
    rows: Iterable[Mapping[str, object]], key_figures: Mapping[str, str]
) -> dict[str, dict[str, float | str]]:
    """Return, by metric, its value at the start (`before`) and at the end (`after`) of a run, and its better direction (`better`).

    For held-out prompts, `before` and `after` are the first and the last value; for training, means over the first and the last steps, at
    most 10 each. Metrics with fewer than two values are left out.

    Args:
        rows: rows of `metrics.jsonl`, in order.
        key_figures: the better direction of each metric to return: `up` or `down`.
    """
    found: dict[str, dict[str, float | str]] = {}
    values: dict[str, list[float]] = {name: [] for name in key_figures}
    for row in rows:
        for name, series in values.items():
            if is_number(value := row.get(name)):
                series.append(value)
    for name, series in values.items():
        if len(series) > 1:
            edge = 1 if name.startswith("val/") else min(10, len(series) // 2)
            before, after = (sum(part) / edge for part in (series[:edge], series[-edge:]))
            found[name] = {"before": before, "after": after, "better": key_figures[name]}
    return found


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def write_figure(value: float, style: str = "number") -> str:
    """Return a number as short text in a style: `number` (two to four digits), `percent`, `length`, `seconds` or `gib`."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if style == "percent":
        # Rewards need not lie in [0, 1]; a percentage of another value would mislead.
        return f"{100 * value:.1f}%" if 0 <= value <= 1 else f"{value:.3g}"
    if style == "length":
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if style == "seconds":
        return write_seconds(value)
    if style == "gib":
        return f"{value / GIB:.3g}"
    if value != 0 and abs(value) < 0.1:
        return f"{value:.2g}"
    if abs(value) < 1000:
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.2e}"


def write_seconds(seconds: float) -> str:
    """Return a time span as short text: 3.1 ms, 0.42 s, 12.3 s, 2 min 05 s, 3 h 20 min."""
    if 0 < seconds < 0.01:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def style_of(metric: str) -> str:
    """Return the style of a validation metric for `write_figure`: `percent` for accuracies and pass rates, `number` for scores."""
    return "percent" if _SHARE.fullmatch(metric) else "number"
