"""Finds plugins by `NAME`, `KIND/NAME` or alias. Errors suggest the nearest existing name."""

from __future__ import annotations

from typing import Any

from dovetail.errors import PluginError, PluginNotFoundError, nearest
from dovetail.plugins import PluginEntry, default_index, installed_rules


def plugins_named(plugin: str) -> list[PluginEntry]:
    """Return every plugin with this name or alias, in any state; `kind/name` restricts the search to one kind.

    Raises:
        PluginNotFoundError: the plugin or the kind does not exist; the message suggests the nearest name.
    """
    index = default_index()
    kind, slash, name = plugin.partition("/")
    # A text with a slash may be an alias, such as `openai/gsm8k`.
    if kind not in index.kinds and (not slash or any(plugin in e.aliases for e in index.entries())):
        kind, name = "", plugin
    if kind == "preflight":
        raise _not_a_plugin(name)
    _check_home(kind, name, index)
    check_kind(kind or None, index)
    found = [
        entry
        for entry in index.entries(kind or None)
        if name in (entry.name, f"{entry.name}@{entry.distribution}", *entry.aliases)
    ]
    if found:
        return found
    if kind:
        index.find(kind, name)
    if name in {rule.name for rule in installed_rules()}:
        raise _not_a_plugin(name)
    near = nearest(name, sorted({entry.name for entry in index.entries()}))
    raise PluginNotFoundError(
        f"no installed plugin is named {name!r}",
        hint=f"did you mean {near!r}?"
        if near
        else "`dovetail plugins list` shows the installed plugins",
    )


def one_plugin(plugin: str, command: str) -> PluginEntry:
    """Return the plugin with this name for a command that takes exactly one plugin.

    Raises:
        PluginNotFoundError: the plugin does not exist.
        PluginError: several kinds have a plugin with this name.
    """
    entries = plugins_named(plugin)
    if len(entries) > 1:
        listed = ", ".join(f"{e.kind}/{e.name} of {e.distribution}" for e in entries)
        raise PluginError(
            f"several plugins are named {plugin!r}: {listed}",
            hint=f"name the kind too: dovetail plugins {command} {entries[0].kind}/{entries[0].name}",
        )
    return entries[0]


def _not_a_plugin(rule: str) -> PluginNotFoundError:
    return PluginNotFoundError(
        f"{rule!r} is a preflight rule, not a plugin",
        hint="`dovetail plugins list preflight` describes the rules",
    )


def _check_home(kind: str, name: str, index: Any) -> None:
    """Refuse `kind/name` if only other kinds have a plugin of that name."""
    homes = sorted({e.kind for e in index.entries() if name in (e.name, *e.aliases)})
    if not kind or not homes or kind in homes:
        return
    known = kind in index.kinds
    raise PluginNotFoundError(
        f"no {kind} plugin is named {name!r}" if known else f"there is no kind of plugin {kind!r}",
        hint=f"did you mean {' or '.join(f'{home}/{name}' for home in homes)}?",
    )


def check_kind(kind: str | None, index: Any) -> None:
    """Refuse a kind that has neither an interface nor a plugin.

    Raises:
        PluginNotFoundError: there is no such kind; the message suggests the nearest name.
    """
    if kind is not None and not index.entries(kind):
        index.kind(kind)
