"""`dovetail checkpoint list|verify|prune RUN`: the checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dovetail.cli import render
from dovetail.errors import CheckpointError

if TYPE_CHECKING:
    from dovetail.checkpoint import CheckpointStore

_RUN = click.argument("run", type=click.Path(path_type=Path))
_STEP = click.option("--step", type=click.IntRange(min=0), help="The checkpoint of this step.")


@click.group()
def checkpoint() -> None:
    """List, verify and remove the checkpoints of a run."""


@checkpoint.command("list")
@_RUN
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_checkpoints(run: Path, as_json: bool) -> None:
    """List the checkpoints of RUN, in the order in which they were saved."""
    from dovetail.checkpoint import CheckpointManifest
    from dovetail_console.sizes import write_bytes

    store = _store(run)
    latest, best = store.latest(), store.best()
    manifests = {path: CheckpointManifest.read(path) for path in store.saved()}
    rows = [
        {
            "step": manifest.step,
            "bytes": manifest.total_bytes,
            "latest": path == latest,
            "best": best is not None and path == best.path,
            "path": str(path),
        }
        for path, manifest in manifests.items()
    ]
    if as_json:
        render.dump_json(rows)
        return
    render.table(
        ("STEP", "SIZE", "", "PATH"),
        [
            (
                str(row["step"]),
                write_bytes(manifest.total_bytes),
                " ".join(mark for mark in ("latest", "best") if row[mark]),
                str(row["path"]),
            )
            for row, manifest in zip(rows, manifests.values(), strict=True)
        ],
    )


@checkpoint.command()
@_RUN
@_STEP
def verify(run: Path, step: int | None) -> None:
    """Check that the files of RUN's checkpoints are complete and unchanged."""
    store = _store(run)
    damaged: list[CheckpointError] = []
    for path in store.saved() if step is None else [store.find(step)]:
        try:
            manifest = store.verify(path)
        except CheckpointError as error:
            render.error(error)
            damaged.append(error)
        else:
            render.line(f"{path.name}: {len(manifest.files)} files are as they were written")
    if damaged:
        raise click.exceptions.Exit(damaged[0].exit_code)


@checkpoint.command()
@_RUN
@click.option("--keep", type=click.IntRange(min=1), required=True, help="Checkpoints to keep.")
def prune(run: Path, keep: int) -> None:
    """Remove RUN's older checkpoints; keep the latest ones and the best one."""
    from dovetail.telemetry import RunDirectory

    directory = RunDirectory.open(run)
    with directory.held():
        store = _store(run)
        store.recover()
        removed = store.retire(keep)
    render.line(f"removed {', '.join(removed)}" if removed else "there is nothing to remove")


def _store(run: Path) -> CheckpointStore:
    from dovetail.checkpoint import CheckpointStore
    from dovetail.telemetry import RunDirectory

    return CheckpointStore(RunDirectory.open(run).checkpoints)
