"""`dovetail report`: writes the report of a run from the files in its directory."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
def report(run: Path) -> None:
    """Write report.html into the run directory RUN, and print its path.

    The run may be in progress, ended, or killed.
    """
    from dovetail.telemetry import RunDirectory, visible
    from dovetail_report.page import write_report

    click.echo(visible(str(write_report(RunDirectory.open(run)))))
