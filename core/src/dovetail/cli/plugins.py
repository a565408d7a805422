"""`dovetail plugins list|show|check|new|lock|verify`: what is installed, whether it fits, and what a run used."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from dovetail.cli import render
from dovetail.cli.plugin_lock import lock, verify
from dovetail.errors import PluginError, PluginNotFoundError, nearest
from dovetail.plugins.entry import STATES, PluginEntry
from dovetail.plugins.index import PluginIndex, default_index
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.needs import install_command

if TYPE_CHECKING:
    from dovetail.plugins.page import Page, Setting

SCHEMA = 1
SDK = "dovetail_sdk"
SDK_COMMANDS = {
    "check": (f"{SDK}.commands:check", "Run the conformance suite of an installed plugin."),
    "new": (f"{SDK}.commands:new", "Write a package with a small working plugin."),
}
"""Name → (`module:attribute`, what `--help` says of it)."""
_HEADERS = ("KIND", "NAME", "STATE", "DISTRIBUTION", "VERSION", "INTERFACE", "CAPABILITIES")


class PluginsGroup(click.Group):
    """A group with the commands of the SDK, which are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *SDK_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SDK_COMMANDS:
            return super().get_command(ctx, cmd_name)
        if importlib.util.find_spec(SDK) is None:
            raise PluginError(
                f"`dovetail plugins {cmd_name}` comes with the SDK, which is not installed",
                hint="pip install dovetail-sdk",
            )
        module, _, attribute = SDK_COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        here = [(name, command.get_short_help_str(300)) for name, command in self.commands.items()]
        theirs = [(name, text) for name, (_, text) in SDK_COMMANDS.items()]
        with formatter.section("Commands"):
            formatter.write_dl([*here, *theirs])


@click.group(cls=PluginsGroup)
def plugins() -> None:
    """List, show, check, write, lock and verify plugins."""


@plugins.command("list")
@click.option("--kind", help="Only this kind.")
@click.option("--state", type=click.Choice(STATES), help="Only this state.")
@click.option(
    "--probe", is_flag=True, help="Import each plugin in a subprocess: loadable or broken."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_plugins(kind: str | None, state: str | None, probe: bool, as_json: bool) -> None:
    """List the installed plugins. Without --probe, nothing of them is imported."""
    index = default_index()
    _check_kind(kind, index)
    entries: Iterable[PluginEntry] = index.entries(kind)
    if probe:
        from dovetail.plugins.probe import probe as run_probe
        from dovetail.plugins.probe import with_probe

        entries = with_probe(entries, run_probe(entries))
    chosen = [entry for entry in entries if state in (None, entry.state, entry.status)]
    for problem in index.problems:
        render.warning(problem)
    if as_json:
        render.dump_json({"schema": SCHEMA, "plugins": [entry.to_dict() for entry in chosen]})
        return
    render.table(_HEADERS, [_row(entry) for entry in chosen])
    _remarks(chosen)


@plugins.command("show")
@click.argument("plugin", metavar="[KIND/]NAME", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(plugin: tuple[str, ...], as_json: bool) -> None:
    """Show everything that is known of a plugin: state, needs, what it does, columns, settings, a config to copy."""
    if len(plugin) > 1:
        raise click.UsageError(
            f"{' '.join(plugin)!r} is more than one name; did you mean {'/'.join(plugin[:2])!r}?"
        )
    entries = plugins_named(plugin[0])
    if as_json:
        render.dump_json({"schema": SCHEMA, "plugins": [_details(entry) for entry in entries]})
        return
    for i, entry in enumerate(entries):
        if i:
            click.echo()
        _show(entry)


plugins.add_command(lock)
plugins.add_command(verify)


def _row(entry: PluginEntry) -> tuple[str, ...]:
    return (
        entry.kind,
        entry.name,
        entry.status,
        entry.distribution,
        entry.version,
        entry.interface or "-",
        ", ".join(entry.capabilities) or "-",
    )


def _remarks(entries: Iterable[PluginEntry]) -> None:
    """Below the table: why something is not usable, and which needs are unmet here."""
    remarks: dict[str, list[str]] = {}
    for entry in entries:
        text = ""
        if entry.reason:
            text = f"{entry.status}: {entry.reason}" + (f"\n  → {entry.mend}" if entry.mend else "")
        elif unmet := [need for need in entry.needs if not need.met]:
            wanted = " and ".join(f"{need} ({need.found})" for need in unmet)
            text = f"needs {wanted}\n  → {install_command(entry.distribution, unmet)}"
        if text:
            remarks.setdefault(text, []).append(f"{entry.kind}/{entry.name}")
    if remarks:
        click.echo()
    for text, titles in remarks.items():
        click.echo(f"{', '.join(titles)} {text}")


def _show(entry: PluginEntry) -> None:
    manifest = entry.manifest
    known = [
        ("plugin", f"{entry.kind}/{entry.name}"),
        ("state", entry.state + (f": {entry.reason}" if entry.reason else "")),
        ("mend", entry.mend or ""),
        ("distribution", f"{entry.distribution} {entry.version}"),
        ("class", entry.target),
    ]
    if manifest is not None:
        here = KINDS[entry.kind].api if entry.kind in KINDS else "none"
        known += [
            ("interface", f"{manifest.api} (here: {here})"),
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
    if manifest is not None and entry.kind in KINDS:
        from dovetail.plugins.page import page_of

        for heading, lines in _chapters(page_of(manifest)):
            click.echo(f"\n{click.style(heading, bold=True)}")
            for line in lines:
                click.echo(f"  {line}".rstrip())


def _conformance(entry: PluginEntry) -> str:
    """The report that the package ships, in a line; empty where it ships none."""
    from dovetail.plugins.conformance import in_words, shipped_report

    report = shipped_report(entry)
    return in_words(report, entry.version) if report else ""


def _chapters(page: Page) -> Iterator[tuple[str, Iterable[str]]]:
    """The page's parts that have something to say, each with a heading."""
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
    return f"{column.get('name')} ({column.get('dtype')}, {column.get('shape')}): {column.get('meaning')}"


def _details(entry: PluginEntry) -> dict[str, Any]:
    details = entry.to_dict()
    if entry.manifest is not None:
        from dovetail.plugins.conformance import shipped_report, tier

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


def plugins_named(plugin: str) -> list[PluginEntry]:
    """Every plugin of that name or alias, whatever its state; `kind/name` narrows it to one kind.

    Raises:
        PluginNotFoundError: there is none, or no such kind; names the nearest.
    """
    index = default_index()
    kind, slash, name = plugin.partition("/")
    if kind not in KINDS and (not slash or _is_alias(plugin, index)):
        kind, name = "", plugin
    _check_home(kind, name, index)
    _check_kind(kind or None, index)
    found = [
        entry
        for entry in index.entries(kind or None)
        if name in (entry.name, f"{entry.name}@{entry.distribution}", *entry.aliases)
    ]
    if found:
        return found
    if kind:
        index.find(kind, name)
    near = nearest(name, sorted({entry.name for entry in index.entries()}))
    raise PluginNotFoundError(
        f"no installed plugin is named {name!r}",
        hint=f"did you mean {near!r}?" if near else "`dovetail plugins list` shows what there is",
    )


def one_plugin(plugin: str, command: str) -> PluginEntry:
    """The plugin of that name for a command that takes exactly one.

    Raises:
        PluginNotFoundError: there is none.
        PluginError: several kinds have one.
    """
    entries = plugins_named(plugin)
    if len(entries) > 1:
        listed = ", ".join(f"{e.kind}/{e.name} of {e.distribution}" for e in entries)
        raise PluginError(
            f"{plugin!r} names several plugins: {listed}",
            hint=f"say which kind: dovetail plugins {command} {entries[0].kind}/{entries[0].name}",
        )
    return entries[0]


def _is_alias(name: str, index: PluginIndex) -> bool:
    """Whether a text with a slash is an alias, as `openai/gsm8k` is."""
    return any(name in entry.aliases for entry in index.entries())


def _check_home(kind: str, name: str, index: PluginIndex) -> None:
    """Refuse `kind/name` where only other kinds have a plugin of that name."""
    homes = sorted({e.kind for e in index.entries() if name in (e.name, *e.aliases)})
    if not kind or not homes or kind in homes:
        return
    known = kind in KINDS
    raise PluginNotFoundError(
        f"no {kind} plugin is named {name!r}" if known else f"there is no plugin kind {kind!r}",
        hint=f"did you mean {' or '.join(f'{home}/{name}' for home in homes)}?",
    )


def _check_kind(kind: str | None, index: PluginIndex) -> None:
    known = {*KINDS, *(entry.kind for entry in index.entries())}
    if kind is None or kind in known:
        return
    near = nearest(kind, known)
    raise PluginNotFoundError(
        f"there is no plugin kind {kind!r}; the kinds are {', '.join(sorted(KINDS))}",
        hint=f"did you mean {near!r}?" if near else None,
    )
