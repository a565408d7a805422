"""`dovetail report`: write the report of a run from what its directory holds."""

from __future__ import annotations

from pathlib import Path

import click

from dovetail.errors import RunDirectoryError


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
def report(run: Path) -> None:
    """Write report.html into the run directory RUN, and print its path.

    RUN may be of a run that is under way, has ended, or was killed.
    """
    from dovetail.telemetry import RunDirectory
    from dovetail_report.page import write_report

    try:
        click.echo(write_report(RunDirectory.open(run)))
    except OSError as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise RunDirectoryError(
            f"can't write the report of {str(run)!r}: {error.strerror or error}",
            hint="give yourself the right to write there, or copy the run directory and report on the copy",
        ) from error
