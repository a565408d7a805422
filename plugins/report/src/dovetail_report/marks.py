"""Steps of a run with an event: a warning, a resume, a changed setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_EVENTS = {"continues from a checkpoint": "resumed", "setting changed": "setting"}
_MOST = 200


def find_marks(
    warnings: Iterable[Any], events: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the events to mark on the report's curves, in order of steps.

    Each mark has `step`, `kind` (`warning`, `resumed` or `setting`) and `text`.

    Args:
        warnings: the warnings of the run's diagnosis; each warning is marked at its first step.
        events: rows of `events.jsonl`.
    """
    marks = [
        {"step": w.first, "kind": "warning", "text": f"{w.name}: {w.message}"} for w in warnings
    ]
    for row in events:
        kind, step = _EVENTS.get(str(row.get("event"))), row.get("step")
        if kind and isinstance(step, int):
            text = f"changed {row.get('detail', '')}" if kind == "setting" else "resumed"
            marks.append({"step": step, "kind": kind, "text": text})
    return sorted(marks[:_MOST], key=lambda mark: mark["step"])
