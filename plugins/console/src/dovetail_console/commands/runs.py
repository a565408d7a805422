"""`dovetail runs`: lists the runs below a folder with their states, and compares runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dovetail.cli import render
from dovetail.errors import ConfigError


@click.group()
def runs() -> None:
    """List and compare runs."""


@runs.command("list")
@click.argument(
    "paths",
    nargs=-1,
    metavar="[FOLDER]...",
    type=click.Path(path_type=Path),
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_runs(paths: tuple[Path, ...], as_json: bool) -> None:
    """List the runs in FOLDER (by default `runs`) and up to two folders below it, the latest first.

    A run is running, completed, stopped (by a signal), failed, or killed. A run in one of the last three states
    continues if its `dovetail train` is repeated. Scores are given as first → last, for training and for held-out prompts.
    A warning names the problem, its first step, and the key to change.
    """
    paths = paths or (Path("runs"),)
    for path in paths:
        if not path.is_dir():
            raise click.BadParameter(f"Directory '{path}' does not exist.", param_hint="FOLDER")
    rows = [row for path in paths for row in rows_below(path)]
    if as_json:
        render.dump_json(rows)
    elif rows:
        render.table(HEADERS, [cells(row) for row in rows])
    else:
        render.line(f"there is no run in {', '.join(map(str, paths))}")


@runs.command()
@click.argument(
    "paths", nargs=-1, required=True, metavar="RUN RUN...", type=click.Path(path_type=Path)
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default="compare.html",
    show_default=True,
    help="The page with the curves.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(paths: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Compare run directories: print a table and the differences of their configs, and write an HTML page of charts with all runs' curves.

    The page is one file; showing it needs no network.
    """
    from dovetail.telemetry import RunDirectory
    from dovetail_console.comparison import differences, page
    from dovetail_console.run_overview import overview

    if len(paths) < 2:
        raise ConfigError(
            "one run can't be compared; expected two or more", hint="name another run"
        )
    found = [RunDirectory.open(path).path for path in paths]
    rows = [overview(path) for path in found]
    changed = differences(found)
    if not out.parent.is_dir():
        raise ConfigError(
            f"--out={out}: the folder {out.parent} does not exist", hint="create the folder first"
        )
    out.write_text(page(found, [str(path) for path in paths]), encoding="utf-8")
    if as_json:
        render.dump_json({"runs": rows, "differences": changed, "page": str(out)})
        return
    render.table(HEADERS, [cells(row) for row in rows])
    render.line()
    if changed:
        render.table(
            ("KEY", *(path.name for path in found)),
            [(key, *map(str, values)) for key, values in changed.items()],
        )
    else:
        render.line("the configs are equal")
    render.line(f"\ncurves: {out}")


def _restarted(restarts: list[dict[str, Any]]) -> str:
    """Return, as text, the number of restarts and the number of steps that they repeated."""
    if not restarts:
        return ""
    repeated = sum(int(row.get("repeated", 0)) for row in restarts)
    return f", {len(restarts)} restarts, {repeated} steps repeated"


HEADERS = ("RUN", "STATE", "STEP", "TRAINING", "HELD OUT", "AGE", "WARNINGS")


def rows_below(folder: Path) -> list[dict[str, Any]]:
    """Return the overview of each run below a folder, the latest first."""
    from dovetail_console.run_overview import overview, runs_below

    found = (overview(path) for path in runs_below(folder))
    return sorted(found, key=lambda row: str(row["started"]), reverse=True)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the overview of a run as table cells, in the order of `HEADERS`."""
    from dovetail_console.run_overview import age, written

    return (
        row["path"],
        row["state"] + _restarted(row["restarts"]),
        " of ".join("unknown" if row[n] is None else str(row[n]) for n in ("step", "total_steps")),
        ", ".join(written(row, held_out=False)) or "-",
        ", ".join(written(row, held_out=True)) or "-",
        age(row["started"]),
        ", ".join(f"{w['name']} since step {w['since']}: {w['key']}" for w in row["warnings"])
        or "-",
    )
