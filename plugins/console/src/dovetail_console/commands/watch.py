"""`dovetail watch RUN`: follow a run, or the runs of a folder, from another terminal."""

from __future__ import annotations

import functools
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from dovetail.cli import render
from dovetail.errors import RunDirectoryError

if TYPE_CHECKING:
    from dovetail.telemetry import RunDirectory

_SHOWN = 20
"""Maximum number of earlier rows of a run that are shown."""
_IDLE_LOOKS = 30


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default="runs")
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between looks.",
)
@click.option("--once", is_flag=True, help="Show how things stand, and end.")
def watch(path: Path, every: float, once: bool) -> None:
    """Follow PATH, a run directory or a folder of runs, until no run is active. Ctrl-C ends `watch`; the run continues.

    A run is shown as on its own console, with all its warnings and the last 20 of its existing lines. A folder is followed until no run
    was active in 30 consecutive checks, so that the next run of a sweep is followed too.
    """
    from dovetail.telemetry import RunDirectory

    try:
        if RunDirectory.begun(path):
            _follow(RunDirectory.open(path), every, once)
        else:
            _list(path, every, once)
    except KeyboardInterrupt:
        render.line()


def _list(folder: Path, every: float, once: bool) -> None:
    """Print the table of a folder's runs, and print it again whenever it changes."""
    from dovetail.telemetry import RunDirectory
    from dovetail_console.commands.runs import HEADERS, cells
    from dovetail_console.run_overview import overview, runs_below

    @functools.lru_cache(maxsize=1024)
    def row_of(path: Path, *_: object) -> dict[str, Any]:
        return overview(path)

    before: list[tuple[str, ...]] = []
    looks = _IDLE_LOOKS  # number of looks since a run was active
    while True:
        _check(folder)
        # A run is read again only if it has written something or has ended.
        found = [RunDirectory(path) for path in runs_below(folder)]
        rows = [row_of(r.path, r.under_way, _stamp(r.metrics), _stamp(r.summary)) for r in found]
        rows.sort(key=lambda row: str(row["started"]), reverse=True)
        if not rows:
            raise RunDirectoryError(
                f"there is no run in {folder}",
                hint="name a run directory, or a folder that contains some",
            )
        shown = [cells(row) for row in rows]
        # A change of the runs' age alone is not printed.
        if [row[:5] for row in shown] != [row[:5] for row in before]:
            if before and sys.stdout.isatty():
                click.echo("\x1b[2J\x1b[H", nl=False)
            render.table(HEADERS, shown)
            before = shown
        running = any(row["state"] == "running" for row in rows)
        looks = 0 if running else looks + 1
        if once or looks > _IDLE_LOOKS:
            return
        time.sleep(every)


def _stamp(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size
    return None


def _follow(run: RunDirectory, every: float, once: bool) -> None:
    from dovetail.interfaces import PluginContext
    from dovetail_console.config import ConsoleConfig
    from dovetail_console.run_overview import overview, read_or_none
    from dovetail_console.tracker import ConsoleTracker
    from dovetail_diagnosis import RunDiagnosis

    named = read_or_none(lambda: dict(run.read_json("plan.json")["key_figures"])) or {}
    known = SimpleNamespace(key_figures=named)
    tracker = ConsoleTracker(ConsoleConfig(name="console"), PluginContext())
    rows, offset = _new_rows(run.metrics, 0)
    clock = rows[0].get("time", 0.0) if rows else time.time()
    tracker.clock = lambda: clock
    tracker.run_started(None, known, run.path, 0, overview(run.path)["total_steps"] or 0)
    diagnosis, last = RunDiagnosis(), -1
    # The last of the existing rows are shown. A live display also takes a thousand earlier rows and all validations, for its curves.
    live, number, earlier = sys.stdout.isatty(), 0, len(rows) - _SHOWN
    every_nth = max(1, earlier // 1000)
    if earlier > 0 and not live:
        render.line(f"… {earlier:,} earlier rows")
    try:
        while True:
            _check(run.path)
            state = run.state  # read before the rows, so that the run's last rows are shown
            further, offset = _new_rows(run.metrics, offset)
            rows += further
            for row in rows:
                step = row.pop("step", None)
                clock = row.pop("time", clock)
                number += 1
                # A resumed run has begun the file again, with steps that were shown already.
                if not isinstance(step, int) or step < last:
                    continue
                last = step
                numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
                curve = number % every_nth == 0 or any(name.startswith("val/") for name in row)
                if number > earlier or (live and curve):
                    tracker.metrics_logged(step, numbers)
                for warning in diagnosis.observe(step, numbers):
                    render.warning(f"step {step}: {warning.message}")
                    render.line(f"  → {warning.hint} ({warning.page})", err=True)
            rows = []
            if once or state != "running":
                break
            time.sleep(every)
        if state != "running":
            summary = read_or_none(lambda: dict(run.read_json("summary.json"))) or {}
            tracker.run_finished(summary | {"status": state})
    finally:
        tracker.close()


def _check(path: Path) -> None:
    if not path.is_dir():
        raise RunDirectoryError(
            f"the folder {str(path)!r} does not exist (any more)",
            hint="`dovetail runs list` shows the existing runs",
        )


def _new_rows(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a JSON Lines file from byte `offset` on, and the offset for the next call.

    A file that is now shorter than `offset` was written anew and is read from its start.
    """
    text = b""
    with suppress(FileNotFoundError), path.open("rb") as file:
        if path.stat().st_size < offset:
            offset = 0
        file.seek(offset)
        text, _, _ = file.read().rpartition(b"\n")
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows, offset + len(text) + bool(text)
