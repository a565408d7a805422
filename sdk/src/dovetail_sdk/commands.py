"""Commands that the SDK adds to `dovetail plugins`; `python -m dovetail_sdk` has them too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dovetail.cli import render
from dovetail.errors import PluginNotFoundError
from dovetail.plugins.entry import PluginEntry
from dovetail.plugins.index import default_index
from dovetail.plugins.manifest import package_directories
from dovetail_console.conformance_report import FILE_NAME, write_report
from dovetail_console.plugin_names import one_plugin
from dovetail_sdk.scaffold import KINDS, LICENCES, add_plugin, new_plugin
from dovetail_sdk.scaffold.new import EXTENSIONS

SCHEMA = 1
CORE = "dovetail-core"
_GIVEN = click.core.ParameterSource.COMMANDLINE


@click.command()
@click.argument("kind", metavar="KIND")
@click.argument("name")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=".",
    show_default=True,
    help="Folder to write the package to; created if it does not exist.",
)
@click.option(
    "--licence",
    "--license",
    type=click.Choice(LICENCES),
    default=LICENCES[0],
    show_default=True,
    help="The package's licence.",
)
@click.option(
    "--repository",
    is_flag=True,
    help="Add the files of a repository: workflows for tests and releases, hooks, a changelog.",
)
@click.option(
    "--into",
    metavar="PACKAGE_DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Add the plugin to the package in this folder, instead of writing a new package.",
)
@click.pass_context
def new(
    ctx: click.Context,
    kind: str,
    name: str,
    directory: Path,
    licence: str,
    repository: bool,
    into: Path | None,
) -> None:
    """Write a package with a small working plugin NAME of KIND, or add the plugin to an existing package."""
    if into is not None:
        options = ("directory", "licence", "repository")
        given = [key for key in options if ctx.get_parameter_source(key) is _GIVEN]
        if given:
            raise click.UsageError(
                f"--{given[0]} can't be combined with --into, which names an existing package"
            )
        files = add_plugin(kind, name, into)
        render.line(f"{into}: {name!r} of kind {kind} in {len(files)} files, and its entry point:")
        for file in files:
            render.line(f"  {file}")
        render.line(f"next:\n  {_next(into)}")
        return
    package = new_plugin(kind, name, directory, licence=licence, repository=repository)
    parts = "tests" if kind in EXTENSIONS else "config, manifest and tests"
    render.line(f"{package}: {name!r} of kind {kind} with its {parts}; next:")
    render.line(f"  {_next(package)}")
    if repository:
        render.line(f"  git -C {package} init && git -C {package} add .")


def _next(package: Path) -> str:
    """Return the command that installs and tests a package, for the user's current folder."""
    there = "" if package.resolve() == Path.cwd() else f"cd {package} && "
    return f"{there}pip install -e '.[test]' && pytest"


new.epilog = f"KIND is one of {', '.join(KINDS)}."


@click.command()
@click.argument("plugin", metavar="[[KIND/]NAME]", required=False)
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Check every installed plugin but core's own.")
@click.option("--kind", help="With --all: only this kind.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--ship", is_flag=True, help=f"Write the report to {FILE_NAME} in the installed package."
)
@click.option(
    "-k", "only", metavar="EXPRESSION", help="Run only the tests that match, as pytest's -k does."
)
@click.pass_context
def check(
    ctx: click.Context,
    plugin: str | None,
    overrides: tuple[str, ...],
    every: bool,
    kind: str | None,
    as_json: bool,
    ship: bool,
    only: str | None,
) -> None:
    """Check an installed plugin: its class, its manifest, its wheel, and the conformance suite of its kind.

    KEY=VALUE sets an option of the plugin's config for the suite. With --all, prints a table with one line per plugin. Exits with 1
    if something failed. A suite whose requirements are not installed is not run, which does not count as a failure.
    """
    from dovetail_sdk.check.run import check_plugins
    from dovetail_sdk.check.tables import ReportTable, failed, print_report

    entries = _chosen(plugin, overrides, every, kind)
    table = ReportTable(entries) if every and not as_json else None
    reports = []
    for report in check_plugins(entries, overrides, only=only):
        reports.append(report)
        if table is not None:
            table.add(report)
        if ship:
            _ship(report)
    if as_json:
        render.dump_json({"schema": SCHEMA, "reports": reports} if every else reports[0])
    elif table is not None:
        table.finish()
    else:
        print_report(reports[0])
    ctx.exit(1 if any(map(failed, reports)) else 0)


def _chosen(
    plugin: str | None, overrides: tuple[str, ...], every: bool, kind: str | None
) -> list[PluginEntry]:
    """Return the plugins to check, from the command's arguments."""
    if not every:
        if kind is not None:
            raise click.UsageError("--kind needs --all; to check one plugin, name it as KIND/NAME")
        if plugin is None:
            raise click.UsageError("name a plugin, such as rollout/hf, or give --all")
        bare = next((text for text in overrides if "=" not in text), None)
        if bare is not None:
            raise click.UsageError(
                f"{bare!r} is not of the form KEY=VALUE; did you mean {f'{plugin}/{bare}'!r}?"
            )
        entry = one_plugin(plugin, "check")
        if entry.distribution == CORE:
            raise click.UsageError(
                f"{plugin!r} belongs to {CORE}, whose own tests check it; name a plugin of another package"
            )
        return [entry]
    if plugin is not None:
        raise click.UsageError(f"--all checks every plugin; leave out {plugin!r}")
    entries = [entry for entry in default_index().entries(kind) if entry.distribution != CORE]
    if not entries:
        raise PluginNotFoundError(
            f"no package besides {CORE} has plugins of the kind {kind!r} to check"
            if kind
            else f"no package besides {CORE} has plugins to check",
            hint="install the package to check; `dovetail plugins list` shows the installed plugins",
        )
    return entries


def _ship(report: dict[str, Any]) -> None:
    """Write a report to a file in the plugin's installed package, so that the package is shipped with its report."""
    package = report["plugin"]["target"].split(":")[0].split(".")[0]
    place = package_directories(package)[0] / FILE_NAME
    write_report(place, report)
    render.line(f"report → {place}", err=True)
