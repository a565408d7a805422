"""`dovetail runs list [FOLDER]`: the runs below a folder, and how each stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dovetail.cli import render


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
            f"{row['step']} of {row['total_steps'] or 'unknown'}",
            row["checkpoint"] or "none",
            row["started"] or "unknown",
            row["model"] or "unknown",
        )
        for row in rows
    ]
    render.table(("RUN", "STATE", "STEP", "CHECKPOINT", "BEGUN", "MODEL"), shown)


def _row(path: Path) -> dict[str, Any]:
    """What one run directory tells; None for what it does not, as where a file is damaged."""
    from dovetail.checkpoint.store import CheckpointStore
    from dovetail.config.plain_yaml import YamlTextError, parse
    from dovetail.errors import DovetailError
    from dovetail.telemetry.jsonl import read_rows
    from dovetail.telemetry.run_directory import MARKER, RunDirectory

    run = RunDirectory(path)

    def read(name: str) -> dict[str, Any]:
        try:
            content = run.read_json(name)
        except DovetailError:
            return {}
        return content if isinstance(content, dict) else {}

    try:
        config = parse(run.config.read_text(encoding="utf-8"))[0]
        model = config["model"]["path"]
    except (OSError, YamlTextError, KeyError, TypeError):
        model = None
    summary = read("summary.json")
    status = summary.get("status", "running")
    counted = read("plan.json").get("counts", {}).get("steps", "").partition(" ")[0]
    latest = CheckpointStore(run.checkpoints).latest()
    steps = (int(row.get("step", 0)) for row in read_rows(run.metrics))
    return {
        "path": str(path),
        # What says that it is running and is not held, was killed.
        "state": "running" if run.under_way else "killed" if status == "running" else status,
        "step": max(steps, default=0),
        "total_steps": int(counted.replace(",", "")) if counted else None,
        "checkpoint": latest.name if latest is not None else None,
        "started": read(MARKER).get("started"),
        "model": model,
    }
