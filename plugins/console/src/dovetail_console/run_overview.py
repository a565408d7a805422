"""The overview of a run as one row, for lists, comparisons and `dovetail watch`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from dovetail.checkpoint import CheckpointStore
from dovetail.config import read_file
from dovetail.errors import DovetailError
from dovetail.telemetry import RunDirectory, numbers, read_rows
from dovetail_diagnosis import LearningWarning, diagnose, figures

Read = TypeVar("Read")
_SCORE = re.compile(r"val/(?:acc|mean)@\d+")


def runs_below(folder: Path) -> list[Path]:
    """Return the run directories in a folder and up to two folders below it."""
    return [m.parent for depth in ("", "*/", "*/*/") for m in folder.glob(f"{depth}run.json")]


def overview(path: Path) -> dict[str, Any]:
    """Return an overview of one run directory, with None for unknown values, such as the values in a damaged file."""
    run = RunDirectory(path)
    rows = read_or_none(lambda: read_rows(run.metrics)) or []
    total = read_or_none(lambda: run.read_json("plan.json")["counts"]["steps"].partition(" ")[0])
    diagnosis = read_or_none(lambda: diagnose(rows))
    warnings = diagnosis.in_force.values() if diagnosis else ()
    return {
        "path": str(path),
        "state": run.state,
        "step": read_or_none(lambda: max((int(row["step"]) for row in rows), default=0)),
        "total_steps": read_or_none(lambda: int(total.replace(",", ""))) if total else None,
        "checkpoint": read_or_none(lambda: CheckpointStore(run.checkpoints).find().name),
        "started": read_or_none(lambda: str(run.read_json("run.json")["started"])),
        "model": read_or_none(lambda: str(read_file(run.config).tree["model"]["path"])),
        "restarts": read_or_none(lambda: read_rows(RunDirectory(path).restarts)) or [],
        "figures": ends_of(run, rows),
        "warnings": [_described(warning) for warning in warnings],
    }


def ends_of(run: RunDirectory, rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the key metrics and the validation score of a run by name, each as a mapping with three keys.

    `before` and `after` are the values at the start and at the end of the run, `better` is the direction that is better, `up` or `down`.
    """
    named = read_or_none(lambda: dict(run.read_json("plan.json")["key_figures"])) or {
        "reward/mean": "up"
    }
    scores = {name: "up" for row in rows[:1] for name in row if _SCORE.fullmatch(name)}
    best = min(scores, default=None)  # acc is preferred to mean
    return numbers.before_and_after(rows, named | ({best: "up"} if best else {}))


def _described(warning: LearningWarning) -> dict[str, Any]:
    return {
        "name": warning.name,
        "since": warning.first,
        "message": warning.message,
        "key": warning.key,
        "see": warning.page,
    }


def written(row: Mapping[str, Any], *, held_out: bool) -> Iterator[str]:
    """Yield the key metrics of an overview as text, such as `reward 0.120 → 0.840`.

    Args:
        row: the overview of a run; see `overview`.
        held_out: whether to yield the metrics of held-out prompts; else those of training.
    """
    for name, ends in row["figures"].items():
        if name.startswith("val/") == held_out:
            figure = figures.key_figure(name, ends["better"])
            style = numbers.style_of(name) if "@" in name else figure.style
            values = (numbers.write_figure(ends[end], style) for end in ("before", "after"))
            yield f"{figure.short.removeprefix('val_')} {' → '.join(values)}"


def age(started: str | None) -> str:
    """Return the time since a run began, as text."""
    began = read_or_none(lambda: datetime.fromisoformat(str(started)))
    if began is None or began.tzinfo is None:
        return "unknown"
    seconds = max(0.0, (datetime.now(UTC) - began).total_seconds())
    return numbers.write_seconds(seconds) if seconds < 172_800 else f"{seconds / 86_400:.0f} days"


def read_or_none(read: Callable[[], Read]) -> Read | None:
    """Call `read`; return None if the file is missing or damaged, so that one damaged run does not hide other runs."""
    try:
        return read()
    except (
        DovetailError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
    ):
        return None
