"""`dovetail plugins list|show|check|new|lock|verify`: what is installed, whether it fits, and what a run used."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Iterable

import click

from dovetail.cli import render
from dovetail.cli.plugin_lock import lock, verify
from dovetail.cli.plugin_names import check_kind, plugins_named
from dovetail.cli.plugin_page import details_of, show_plugin
from dovetail.errors import PluginError
from dovetail.plugins.entry import STATES, PluginEntry
from dovetail.plugins.index import default_index

SCHEMA = 1
SDK = "dovetail_sdk"
SDK_COMMANDS = {
    "check": (f"{SDK}.commands:check", "Run the conformance suite of an installed plugin."),
    "new": (f"{SDK}.commands:new", "Write a package with a small working plugin."),
}
"""Name → (`module:attribute`, what `--help` says of it)."""
_COUNTED = ("preset", "rollout_correction")
"""Kinds with many plugins, which a listing of every kind only counts."""
_UNMARKED = ("compatible", "loadable")
"""States that go without saying."""


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
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        here = [(name, command.get_short_help_str(300)) for name, command in self.commands.items()]
        theirs = [(name, text) for name, (_, text) in SDK_COMMANDS.items()]
        with formatter.section("Commands"):
            formatter.write_dl([*here, *theirs])


@click.group(cls=PluginsGroup)
def plugins() -> None:
    """List, show, check, write, lock and verify plugins."""


@plugins.command("list")
@click.argument("kind", required=False)
@click.option("--all", "every", is_flag=True, help="Name the plugins of every kind.")
@click.option("--state", type=click.Choice(STATES), help="Only this state.")
@click.option(
    "--probe", is_flag=True, help="Import each plugin in a subprocess: loadable or broken."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_plugins(
    kind: str | None, every: bool, state: str | None, probe: bool, as_json: bool
) -> None:
    """List the installed plugins by kind; with KIND, those of one kind with state, interface and capabilities.

    Presets and rollout corrections are counted unless you ask for them. Without --probe, no plugin is imported.
    With preflight for KIND, list the rules that judge a config before step 1.
    """
    if kind == "preflight":
        _rules(as_json)
        return
    index = default_index()
    check_kind(kind, index)
    entries: Iterable[PluginEntry] = index.entries(kind)
    if probe:
        from dovetail.plugins.probe import probed

        entries = probed(entries)
    chosen = [entry for entry in entries if state in (None, entry.state, entry.status)]
    for problem in index.problems:
        render.warning(problem)
    if as_json:
        render.dump_json({"schema": SCHEMA, "plugins": [entry.to_dict() for entry in chosen]})
        return
    for title, group in itertools.groupby(chosen, key=lambda entry: entry.kind):
        render.line(title, bold=True)
        if kind:
            _details(group)
        elif title in _COUNTED and not (every or state):
            render.line(f"  {len([*group])} plugins")
        else:
            _names(group)
    _remarks(chosen)
    if not kind:
        render.line()
        render.paragraph(
            "`dovetail plugins list KIND` describes the plugins of one kind, `dovetail plugins show NAME` one plugin; "
            "--all names the plugins of every kind. `dovetail plugins list preflight` describes the rules that judge a config."
        )


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
        render.dump_json({"schema": SCHEMA, "plugins": [details_of(entry) for entry in entries]})
        return
    for i, entry in enumerate(entries):
        if i:
            render.line()
        show_plugin(entry)


plugins.add_command(lock)
plugins.add_command(verify)


def _rules(as_json: bool) -> None:
    """The preflight rules, which are functions, imported to be listed."""
    from dovetail.plugins.rules import installed_rules

    rules = installed_rules()
    if as_json:
        listed = [{"name": r.name, "distribution": r.distribution, "doc": r.doc} for r in rules]
        render.dump_json({"schema": SCHEMA, "rules": listed})
        return
    render.line("preflight", bold=True)
    for rule in rules:
        render.line(f"  {rule.name} ({rule.distribution})")
        render.paragraph(" ".join(rule.doc.split("\n\n")[0].split()), indent=4)
    render.line()
    render.paragraph("`preflight.ignore=NAME` in a config silences a rule.")


def _names(entries: Iterable[PluginEntry]) -> None:
    """The names of a kind, a paragraph a distribution; a state that needs attention is in brackets."""
    names: dict[str, list[str]] = {}
    for entry in entries:
        state = "" if entry.status in _UNMARKED else f" [{entry.status}]"
        names.setdefault(f"{entry.distribution} {entry.version}", []).append(entry.name + state)
    for distribution, its in names.items():
        render.paragraph(f"{', '.join(its)} ({distribution})", indent=2)


def _details(entries: Iterable[PluginEntry]) -> None:
    """What is known of each plugin of a kind without importing it."""
    for entry in entries:
        render.line(f"  {entry.name}")
        interface = f"; interface {entry.interface}" if entry.interface else ""
        about = f"{entry.status}; {entry.distribution} {entry.version}{interface}"
        render.paragraph(about, indent=4)
        if entry.capabilities:
            render.paragraph(f"can: {', '.join(entry.capabilities)}", indent=4)


def _remarks(entries: Iterable[PluginEntry]) -> None:
    """Below the list: why something is not usable, and which needs are unmet here."""
    remarks: dict[str, list[str]] = {}
    for entry in entries:
        text = ""
        if entry.reason:
            text = f"{entry.status}: {entry.reason}" + (f"\n  → {entry.fix}" if entry.fix else "")
        elif unmet := [need for need in entry.needs if not need.met]:
            wanted = " and ".join(f"{need} ({need.found})" for need in unmet)
            text = f"needs {wanted}\n  → {entry.install_command}"
        if text:
            remarks.setdefault(text, []).append(f"{entry.kind}/{entry.name}")
    if remarks:
        render.line()
    for text, titles in remarks.items():
        reason, *fix = text.split("\n")
        render.paragraph(f"{', '.join(titles)} {reason}")
        for line in fix:  # not wrapped: it may be a command to copy
            render.line(line)
