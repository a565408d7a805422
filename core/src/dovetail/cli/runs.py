"""`dovetail runs list [FOLDER]`: the runs below a folder, and how each stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dovetail.cli import render
from dovetail.errors import DovetailError

if TYPE_CHECKING:
    from dovetail.telemetry.run_directory import RunDirectory

Told = TypeVar("Told")


@click.group()
def runs() -> None:
    """List runs."""


@runs.command("list")
@click.argument(
    "folder", type=click.Path(path_type=Path, exists=True, file_okay=False), default="runs"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_runs(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER and up to two folders below it, the one begun last first.

    A run is running, completed, stopped (by a signal), failed, or killed: the same `dovetail train` continues the last three.
    """
    from dovetail.telemetry.run_directory import MARKER

    found = [m.parent for depth in ("", "*/", "*/*/") for m in folder.glob(f"{depth}{MARKER}")]
    rows = sorted((_row(path) for path in found), key=lambda row: str(row["started"]), reverse=True)
    if as_json:
        render.dump_json(rows)
        return
    if not rows:
        render.line(f"there is no run in {folder}")
        return
    shown = [
        (
            row["path"],
            row["state"],
            " of ".join(_shown(row[name]) for name in ("step", "total_steps")),
            row["checkpoint"] or "none",
            row["started"] or "unknown",
            row["model"] or "unknown",
        )
        for row in rows
    ]
    render.table(("RUN", "STATE", "STEP", "CHECKPOINT", "BEGUN", "MODEL"), shown)


def _shown(number: int | None) -> str:
    return "unknown" if number is None else str(number)


def _row(path: Path) -> dict[str, Any]:
    """What one run directory tells; None for what it does not, as where a file is damaged."""
    from dovetail.checkpoint.store import CheckpointStore
    from dovetail.config.plain_yaml import parse
    from dovetail.telemetry.jsonl import read_rows
    from dovetail.telemetry.run_directory import MARKER, RunDirectory

    run = RunDirectory(path)
    total = _told(lambda: run.read_json("plan.json")["counts"]["steps"].partition(" ")[0])
    return {
        "path": str(path),
        "state": state_of(run),
        "step": _told(lambda: max((int(row["step"]) for row in read_rows(run.metrics)), default=0)),
        "total_steps": _told(lambda: int(total.replace(",", ""))) if total else None,
        "checkpoint": _told(lambda: CheckpointStore(run.checkpoints).find().name),
        "started": _told(lambda: str(run.read_json(MARKER)["started"])),
        "model": _told(
            lambda: str(parse(run.config.read_text(encoding="utf-8"))[0]["model"]["path"])
        ),
    }


def state_of(run: RunDirectory) -> str:
    """Return `running`, or how it ended: `completed`, `stopped`, `failed` or `killed`."""
    status = _told(lambda: str(run.read_json("summary.json")["status"])) or "running"
    # What says that it is running and is not held, was killed.
    return "running" if run.under_way else "killed" if status == "running" else status


def _told(read: Callable[[], Told]) -> Told | None:
    """What is read, or None where it is missing or damaged: one damaged run does not hide the others."""
    try:
        return read()
    except (DovetailError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
