"""Commands that the SDK adds to `dovetail plugins`; `python -m dovetail_sdk` has them too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dovetail.cli import render
from dovetail.cli.plugins import plugins_named
from dovetail.errors import PluginError
from dovetail.plugins.conformance import (
    FILE_NAME,
    OUTCOMES,
    TIERS,
    counts,
    write_report,
)
from dovetail.plugins.manifest import package_directories
from dovetail_sdk.scaffold import KINDS, LICENCES, new_plugin

_COLOURS = {"passed": "green", "failed": "red", "expected": "yellow", "skipped": "cyan"}


@click.command()
@click.argument("kind", metavar="KIND")
@click.argument("name")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=".",
    show_default=True,
    help="Where to put the package.",
)
@click.option(
    "--licence",
    "--license",
    type=click.Choice(LICENCES),
    default=LICENCES[0],
    show_default=True,
    help="The package's licence.",
)
def new(kind: str, name: str, directory: Path, licence: str) -> None:
    """Write a package with a small working plugin NAME of KIND."""
    package = new_plugin(kind, name, directory, licence=licence)
    click.echo(f"{package}: a {kind} plugin {name!r} with its config, manifest and tests; next:")
    click.echo(f"  cd {package} && pip install -e '.[test]' && pytest")


new.epilog = f"KIND is one of {', '.join(KINDS)}."


@click.command()
@click.argument("plugin", metavar="[KIND/]NAME")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"Put the report into this file too, such as the {FILE_NAME} of a package.",
)
@click.option(
    "--ship", is_flag=True, help=f"Put the report into the installed package, as {FILE_NAME}."
)
@click.option(
    "-k", "only", metavar="EXPRESSION", help="Only the tests that match, as pytest's -k has it."
)
@click.pass_context
def check(
    ctx: click.Context,
    plugin: str,
    overrides: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    ship: bool,
    only: str | None,
) -> None:
    """Check an installed plugin: its class, its manifest, its wheel, and the conformance suite of its kind.

    KEY=VALUE are settings of its config for the suite. Exits with 1 where something failed. Where the plugin needs
    what is not here, its suite is not run, and that is no failure.
    """
    from dovetail_sdk.check.run import check_plugin

    entries = plugins_named(plugin)
    if len(entries) > 1:
        listed = ", ".join(f"{e.kind}/{e.name} of {e.distribution}" for e in entries)
        raise PluginError(
            f"{plugin!r} names several plugins: {listed}",
            hint=f"say which kind: dovetail plugins check {entries[0].kind}/{entries[0].name}",
        )
    report = check_plugin(entries[0], overrides, only=only)
    if as_json:
        render.dump_json(report)
    else:
        _print(report)
    places = [output] if output else []
    if ship:
        places.append(package_directories(entries[0].target.split(":")[0].split(".")[0])[0] / FILE_NAME)  # fmt: skip
    for place in places:
        write_report(place, report)
        click.echo(f"report → {place}", err=True)
    ctx.exit(1 if failed(report) else 0)


def failed(report: dict[str, Any]) -> bool:
    """Whether a check or a test of a report failed."""
    return any(item["outcome"] == "failed" for item in [*report["checks"], *report["tests"]])


def _print(report: dict[str, Any]) -> None:
    """The report for people: what is not plain success with its reason, and a line on the whole."""
    plugin = report["plugin"]
    click.echo(
        f"{plugin['kind']}/{plugin['name']} of {plugin['distribution']} {plugin['version']}, "
        f"interface {report['interface']['range'] or 'unknown'} (here: {report['interface']['version']})\n"
    )
    rows = [(item["outcome"], item["name"], "") for item in report["checks"]]
    rows += [(t["outcome"], t["name"], f"{t['seconds']:.2f} s") for t in report["tests"]]
    render.table(("OUTCOME", "CHECK OR TEST", "TIME"), rows)
    for outcome in ("failed", "expected", "skipped"):
        for item in [*report["checks"], *report["tests"]]:
            if item["outcome"] == outcome:
                _print_reason(item)
    for name, fact in report["facts"].items():
        if not fact["holds"]:
            click.echo(f"\nnot {name}: {fact['reason']}")
    if report["not_run"]:
        click.echo(f"\nthe suite was not run: {report['not_run']}")
    told = counts(report)
    summary = ", ".join(f"{told[outcome]} {outcome}" for outcome in OUTCOMES if told[outcome])
    tier = report["tier"]
    earned = f"{tier}: {TIERS[tier]}" if tier else "no tier"
    click.echo(f"\n{summary or 'no test ran'} in {report['seconds']:.1f} s; {earned}")


def _print_reason(item: dict[str, Any]) -> None:
    outcome = click.style(item["outcome"], fg=_COLOURS[item["outcome"]], bold=True)
    text = item.get("message") or item.get("reason") or "no reason given"
    click.echo(f"\n{outcome} {item['name']}: {text}")
    if item.get("hint"):
        click.echo(f"  → {item['hint']}")
