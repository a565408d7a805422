"""`python -m dovetail_sdk new|check|manifest|docs|interfaces`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from dovetail.cli import render
from dovetail.errors import DovetailError
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.manifest import COMMAND
from dovetail_sdk.commands import check, new
from dovetail_sdk.manifest import drift, write
from dovetail_sdk.project import read_project


@click.group()
def main() -> None:
    """Tools for plugin authors."""


main.add_command(new)
main.add_command(check)


@main.command()
@click.argument(
    "directories", metavar="[PACKAGE_DIR]...", nargs=-1, type=click.Path(path_type=Path)
)
@click.option(
    "--check", is_flag=True, help="Write nothing; exit with 1 if a manifest is out of date."
)
@click.pass_context
def manifest(ctx: click.Context, directories: tuple[Path, ...], check: bool) -> None:
    """Write the dovetail-plugin.json of each package from its plugin classes. The default is the package in the current folder."""
    failed = False
    for directory in directories or (Path(),):
        try:
            failed |= not _one(directory, check=check)
        except DovetailError as error:
            render.error(error)
            failed = True
    ctx.exit(1 if failed else 0)


@main.command()
@click.argument(
    "directories", metavar="[PACKAGE_DIR]...", nargs=-1, type=click.Path(path_type=Path)
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, file_okay=False),
    default="docs/plugins",
    show_default=True,
    help="Folder to write the pages to.",
)
@click.pass_context
def docs(ctx: click.Context, directories: tuple[Path, ...], output: Path) -> None:
    """Write a docs page for each plugin, and an index, from packages' manifests. The default is the package in the current folder.

    Earlier pages of plugins outside these packages are removed from the output folder.
    """
    from dovetail_sdk.docs import write as write_pages

    try:
        projects = [read_project(directory) for directory in directories or (Path(),)]
        click.echo(f"{write_pages(projects, output)} pages → {output}")
    except DovetailError as error:
        render.error(error)
        ctx.exit(1)


@main.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if it is out of date.")
@click.pass_context
def interfaces(ctx: click.Context, check: bool) -> None:
    """Write the description of every plugin interface to disk; fail if an interface changed without the required version bump."""
    from dovetail_sdk import interfaces as described

    try:
        if not check:
            click.echo(f"{len(KINDS)} interfaces → {described.write()}")
            return
        before, now = described.read(), described.describe_all()
    except DovetailError as error:
        render.error(error)
        ctx.exit(1)
    if before == now:
        click.echo(f"{len(KINDS)} interfaces: the description is up to date")
        return
    missing = described.missing_bumps(before, now)
    _refuse(f"{described.PLACE} is out of date", missing, described.COMMAND)
    ctx.exit(1)


def _one(directory: Path, *, check: bool) -> bool:
    """Write or check one manifest; return whether it is up to date."""
    project = read_project(directory)
    if not project.plugins:
        click.echo(f"{project.distribution}: no plugins")
        return True
    plugins = f"{project.distribution}: {len(project.plugins)} plugins"
    if not check:
        click.echo(f"{plugins} → {write(project)}")
        return True
    differences = drift(project)
    if differences:
        title = f"{project.distribution}: the manifest is out of date"
        _refuse(title, differences, f"{COMMAND} {directory}")
        return False
    click.echo(f"{plugins}, as described")
    return True


def _refuse(title: str, differences: Iterable[str], command: str) -> None:
    """Print the differences of a file that is out of date, and the command that updates the file."""
    for line in (title, *(f"  - {difference}" for difference in differences), f"  → {command}"):
        click.echo(line, err=True)


if __name__ == "__main__":
    main(prog_name="python -m dovetail_sdk")
