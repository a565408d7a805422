"""`dovetail plugins show`: a plugin's state, needs, purpose, columns, settings, and an example config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from dovetail.batch import sizes_of
from dovetail.cli import render
from dovetail.plugins import PluginEntry, default_index
from dovetail_console.plugin_names import plugins_named

if TYPE_CHECKING:
    from dovetail_console.plugin_page import Page, Setting

SCHEMA = 1


@click.command()
@click.argument("plugin", metavar="[KIND/]NAME", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(plugin: tuple[str, ...], as_json: bool) -> None:
    """Show a plugin's state, needs, description, columns and settings, and a config to copy."""
    if len(plugin) > 1:
        raise click.UsageError(
            f"{' '.join(plugin)!r} is more than one name; did you mean {'/'.join(plugin[:2])!r}?"
        )
    entries = plugins_named(plugin[0])
    if as_json:
        render.dump_json({"schema": SCHEMA, "plugins": [details_of(entry) for entry in entries]})
        return
    for i, entry in enumerate(entries):
        if i:
            render.line()
        show_plugin(entry)


def show_plugin(entry: PluginEntry) -> None:
    """Print a plugin's details."""
    manifest = entry.manifest
    known = [
        ("plugin", f"{entry.kind}/{entry.name}"),
        ("state", entry.state + (f": {entry.reason}" if entry.reason else "")),
        ("fix", entry.fix or ""),
        ("distribution", f"{entry.distribution} {entry.version}"),
        ("class", entry.target),
    ]
    if manifest is not None:
        kind = default_index().kinds.get(entry.kind)
        known += [
            ("interface", f"{manifest.api} (here: {kind.api if kind else 'none'})"),
            ("aliases", ", ".join(manifest.aliases)),
            ("capabilities", ", ".join(manifest.capabilities)),
            ("columns", "\n".join(_column(column) for column in manifest.columns)),
            (
                "needs",
                "\n".join(
                    f"{n}: {'met by ' if n.met else 'unmet, '}{n.found}" for n in entry.needs
                ),
            ),
            ("environment", "one of its own: runtime.environments" if manifest.isolated else ""),
            ("config", manifest.config),
            ("conformance", _conformance(entry)),
        ]
    render.fields([(name, value) for name, value in known if value])
    if manifest is not None and entry.kind in default_index().kinds:
        from dovetail_console.plugin_page import page_of

        for heading, lines in _chapters(page_of(manifest)):
            render.line()
            render.line(heading, bold=True)
            for line in lines:
                render.line(f"  {line}".rstrip())


def details_of(entry: PluginEntry) -> dict[str, Any]:
    """Return a plugin's details as JSON values: its row of `plugins list`, manifest and conformance report."""
    details = entry.to_dict()
    if entry.manifest is not None:
        from dovetail_console.conformance_report import shipped_report, tier

        report = shipped_report(entry)
        details |= {
            "conformance": {"tier": tier(report), "report": report} if report else None,
            "requires": entry.manifest.requires,
            "provides": entry.manifest.provides,
            "columns": [dict(column) for column in entry.manifest.columns],
            "config": entry.manifest.config,
            "config_schema": entry.manifest.config_schema,
            "doc": entry.manifest.doc,
            "settings": entry.manifest.settings,
            "facts": entry.manifest.facts,
        }
    return details


def _conformance(entry: PluginEntry) -> str:
    """Return the conformance report that the package ships, as one line; empty if it ships none."""
    from dovetail_console.conformance_report import in_words, shipped_report

    report = shipped_report(entry)
    return in_words(report, entry.version) if report else ""


def _chapters(page: Page) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the page's non-empty parts, each with a heading."""
    if page.doc or page.summary:
        yield "what it does", (page.doc or page.summary).splitlines()
    for heading, notes in (("requires", page.requires), ("provides", page.provides)):
        if notes is None:
            yield heading, ["depends on its config"]
        elif notes:
            yield heading, [f"{note.name} ({note.holds}): {note.meaning}" for note in notes]
    if page.settings:
        yield "settings", [line for setting in page.settings for line in _setting(setting)]
    if page.example:
        places = f" (or at {', '.join(page.places[1:])})" if page.places[1:] else ""
        yield f"in a config{places}", page.example.splitlines()
    if page.stands_for:
        yield "stands for, where nothing else is given", page.stands_for.splitlines()


def _setting(setting: Setting) -> Iterator[str]:
    default = {"": "", "required": ", required"}.get(setting.default, f" = {setting.default}")
    allowed = f" ({setting.allowed})" if setting.allowed else ""
    yield f"{setting.name}: {setting.type}{default}{allowed}"
    yield f"    {setting.doc}"


def _column(column: Mapping[str, Any]) -> str:
    inner = column.get("inner")
    each = f", each {sizes_of(*inner)}" if inner else ""
    return (
        f"{column.get('name')} ({column.get('dtype')}, {column.get('shape')}{each}): "
        f"{column.get('meaning')}"
    )
