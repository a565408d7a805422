"""`python -m dovetail_sdk new|check|manifest|docs|interfaces`."""

from __future__ import annotations

from pathlib import Path

import click

from dovetail.cli import render
from dovetail.errors import DovetailError
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.manifest import COMMAND
from dovetail_sdk import docs as docs_pages
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
    "--check", is_flag=True, help="Write nothing; exit with 1 where a manifest has drifted."
)
@click.pass_context
def manifest(ctx: click.Context, directories: tuple[Path, ...], check: bool) -> None:
    """Write dovetail-plugin.json of each package from its classes; the current folder's by default."""
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
    default="docs/algorithms",
    show_default=True,
    help="Where the pages go.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 where a page has drifted.")
@click.option(
    "--prune",
    is_flag=True,
    help="These are all packages: remove (or, with --check, name) the pages of other plugins.",
)
@click.option(
    "--interfaces",
    "reference",
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder for reference pages of Dovetail's own interfaces, made from its code.",
)
@click.option(
    "--engines",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A page in which the capabilities of engines are written, between its marks.",
)
@click.pass_context
def docs(
    ctx: click.Context,
    directories: tuple[Path, ...],
    output: Path,
    check: bool,
    prune: bool,
    reference: Path | None,
    engines: Path | None,
) -> None:
    """Write a page of each algorithm, and an index, from the packages' manifests; the current folder's by default."""
    from dovetail_sdk import docs_engines, docs_interfaces

    try:
        projects = [read_project(directory) for directory in directories or (Path(),)]
        if not check:
            click.echo(f"{docs_pages.write(projects, output, prune=prune)} pages → {output}")
            if reference:
                click.echo(f"{docs_interfaces.write(reference)} pages → {reference}")
            if engines:
                docs_engines.write(projects, engines)
                click.echo(f"capabilities → {engines}")
            return
        differences = docs_pages.drift(projects, output, prune=prune)
        differences += docs_interfaces.drift(reference) if reference else []
        differences += docs_engines.drift(projects, engines) if engines else []
    except DovetailError as error:
        render.error(error)
        ctx.exit(1)
    if not differences:
        click.echo(f"{output}: as the plugins say")
        if reference:
            click.echo(f"{reference}: as the code says")
        return
    click.echo(f"{output}: the pages have drifted", err=True)
    for difference in differences:
        click.echo(f"  - {difference}", err=True)
    fix = [docs_pages.COMMAND, *map(str, directories), *(["--prune"] if prune else [])]
    fix += ["--interfaces", str(reference)] if reference else []
    fix += ["--engines", str(engines)] if engines else []
    click.echo(f"  → {' '.join(fix)}", err=True)
    ctx.exit(1)


@main.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 where it has drifted.")
@click.pass_context
def interfaces(ctx: click.Context, check: bool) -> None:
    """Write the description of every interface, once each change has the version that it needs."""
    from dovetail_sdk import interfaces as described

    try:
        if not check:
            click.echo(f"{len(KINDS)} interfaces → {described.write()}")
            return
        before, now = described.read(), described.describe_all()
    except DovetailError as error:
        render.error(error)
        ctx.exit(1)
    complaints = described.missing_bumps(before, now)
    if not complaints and before == now:
        click.echo(f"{len(KINDS)} interfaces, as described")
        return
    click.echo(f"{described.PLACE}: the description has drifted", err=True)
    for complaint in complaints:
        click.echo(f"  - {complaint}", err=True)
    click.echo(f"  → {described.COMMAND}", err=True)
    ctx.exit(1)


def _one(directory: Path, *, check: bool) -> bool:
    """Write or check one manifest; whether it is as it should be."""
    project = read_project(directory)
    if not project.plugins:
        click.echo(f"{project.distribution}: no plugins")
        return True
    if not check:
        path = write(project)
        click.echo(f"{project.distribution}: {len(project.plugins)} plugins → {path}")
        return True
    differences = drift(project)
    if not differences:
        click.echo(f"{project.distribution}: {len(project.plugins)} plugins, as described")
        return True
    click.echo(f"{project.distribution}: the manifest has drifted", err=True)
    for difference in differences:
        click.echo(f"  - {difference}", err=True)
    click.echo(f"  → {COMMAND} {directory}", err=True)
    return False


if __name__ == "__main__":
    main(prog_name="python -m dovetail_sdk")
