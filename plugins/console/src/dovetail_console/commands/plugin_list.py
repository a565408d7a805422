"""`dovetail plugins list`: the installed plugins and their states."""

from __future__ import annotations

import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterable

import click

from dovetail.cli import render
from dovetail.plugins import STATES, PluginEntry, default_index

SCHEMA = 1
_COUNTED = ("preset", "rollout_correction")
"""Kinds with many plugins; the list of all kinds shows how many these are, not their names."""


@click.command("list")
@click.argument("kind", required=False)
@click.option("--all", "every", is_flag=True, help="Name the plugins of every kind.")
@click.option("--state", type=click.Choice(STATES), help="Only this state.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_plugins(kind: str | None, every: bool, state: str | None, as_json: bool) -> None:
    """List the installed plugins by kind; with KIND, list the plugins of one kind with state, interface and capabilities.

    Of presets and rollout corrections, only the number is shown, unless KIND, --all or --state is given. No plugin is imported;
    `dovetail doctor` imports them.
    If KIND is preflight, list the rules that check a config before step 1.
    """
    if kind == "preflight":
        _rules(as_json)
        return
    index = default_index()
    if kind is not None and not index.entries(kind):
        index.kind(kind)  # raises, naming the nearest kind
    entries: Iterable[PluginEntry] = index.entries(kind)
    chosen = [entry for entry in entries if state in (None, entry.state)]
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
        _paragraph(
            "`dovetail plugins list KIND` describes the plugins of one kind, `dovetail plugins show NAME` one plugin; "
            "--all names the plugins of every kind. `dovetail plugins list preflight` describes the rules that judge a config."
        )


def _rules(as_json: bool) -> None:
    """Print the preflight rules, which must be imported, since they are functions without a manifest."""
    from dovetail.plugins import installed_rules

    rules = installed_rules()
    if as_json:
        listed = [{"name": r.name, "distribution": r.distribution, "doc": r.doc} for r in rules]
        render.dump_json({"schema": SCHEMA, "rules": listed})
        return
    render.line("preflight", bold=True)
    for rule in rules:
        render.line(f"  {rule.name} ({rule.distribution})")
        _paragraph(" ".join(rule.doc.split("\n\n")[0].split()), indent=4)
    render.line()
    _paragraph("`preflight.ignore=NAME` in a config silences a rule.")


def _names(entries: Iterable[PluginEntry]) -> None:
    """Print the plugins' names, one paragraph for each distribution; a state that needs attention is in brackets."""
    names: dict[str, list[str]] = {}
    for entry in entries:
        state = "" if entry.usable else f" [{entry.state}]"
        names.setdefault(f"{entry.distribution} {entry.version}", []).append(entry.name + state)
    for distribution, its in names.items():
        _paragraph(f"{', '.join(its)} ({distribution})", indent=2)


def _details(entries: Iterable[PluginEntry]) -> None:
    """Print the facts about each plugin that are known without importing it."""
    for entry in entries:
        render.line(f"  {entry.name}")
        interface = f"; interface {entry.interface}" if entry.interface else ""
        about = f"{entry.state}; {entry.distribution} {entry.version}{interface}"
        _paragraph(about, indent=4)
        if entry.capabilities:
            _paragraph(f"can: {', '.join(entry.capabilities)}", indent=4)


def _remarks(entries: Iterable[PluginEntry]) -> None:
    """Print, below the list, why plugins are not usable, and which needs are unmet."""
    remarks: dict[str, list[str]] = {}
    for entry in entries:
        text = ""
        if entry.reason:
            text = f"{entry.state}: {entry.reason}" + (f"\n  → {entry.fix}" if entry.fix else "")
        elif unmet := [need for need in entry.needs if not need.met]:
            wanted = " and ".join(f"{need} ({need.found})" for need in unmet)
            text = f"needs {wanted}\n  → {entry.install_command}"
        if text:
            remarks.setdefault(text, []).append(f"{entry.kind}/{entry.name}")
    if remarks:
        render.line()
    for text, titles in remarks.items():
        reason, *fix = text.split("\n")
        _paragraph(f"{', '.join(titles)} {reason}")
        for line in fix:  # not wrapped, since it may be a command to copy
            render.line(line)


def _paragraph(text: str, indent: int = 0) -> None:
    """Print a paragraph, wrapped at the terminal's width; as one line if the output is not a terminal."""
    start = " " * indent
    wrapped = textwrap.fill(
        text,
        shutil.get_terminal_size((sys.maxsize, 0)).columns,
        initial_indent=start,
        subsequent_indent=start + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    render.line(wrapped)
