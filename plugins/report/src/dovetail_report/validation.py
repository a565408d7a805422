"""The latest validation as a table: a row for each data source, a column for each metric over k samples, with intervals."""

from __future__ import annotations

import re
from typing import Any

from dovetail.telemetry import numbers
from dovetail_diagnosis import figures
from dovetail_report.summary import History

_METRIC = re.compile(
    r"val/(?:(?P<source>.+)/)?(?P<kind>acc|mean|pass|majority|best)@(?P<k>\d+)", re.DOTALL
)
_KINDS = ("acc", "mean", "pass", "majority", "best")
"""The metrics of validation, in the order of the columns."""
EVERYTHING = "all"
"""Name of the table's row over all prompts."""


def source_of(name: str, kind: str = "mean") -> str | None:
    """Return the data source in the name of a metric of this kind, such as `gsm8k` in `val/gsm8k/mean@1`; None for any other metric."""
    match = _METRIC.fullmatch(name)
    return match["source"] if match is not None and match["kind"] == kind else None


def validation_table(history: History) -> dict[str, Any] | None:
    """Return step, columns and rows of a table of the latest validation, or None if the table would show only one value.

    Mean and accuracy are always shown, pass@k for every k above 1, majority@k and best@k for the largest k. For k = 1, pass@k,
    majority@k and best@k would equal the mean.
    """
    steps = [step for step in history.steps if any(map(_METRIC.fullmatch, history.at(step)))]
    if not steps:
        return None
    metrics = history.at(steps[-1])
    found: dict[str, dict[tuple[str, int], str]] = {}
    for name, value in metrics.items():
        match = _METRIC.fullmatch(name)
        if match is not None and value is not None:
            written = figures.Figure(name, name, name, numbers.style_of(name)).read(metrics)
            row = found.setdefault(match["source"] or EVERYTHING, {})
            row[match["kind"], int(match["k"])] = written
    largest = max((k for row in found.values() for _, k in row), default=0)
    known = {key for row in found.values() for key in row}
    columns = [
        (kind, k)
        for kind, k in sorted(known, key=lambda key: (_KINDS.index(key[0]), key[1]))
        if kind in ("acc", "mean") or (k > 1 and (kind == "pass" or k == largest))
    ]
    if len(found) * len([kind for kind, _ in columns if kind != "acc"]) < 2:
        return None
    order = sorted(found, key=lambda source: source != EVERYTHING)
    return {
        "step": steps[-1],
        "columns": [f"{kind}@{k}" for kind, k in columns],
        "rows": [(source, [found[source].get(key, "") for key in columns]) for source in order],
    }
