"""Probing: imports plugins in a subprocess, so that not even a crash at import affects the caller."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from dovetail.errors import DovetailError, PluginNeedsError
from dovetail.interfaces import PluginRef
from dovetail.plugins import ask, load_plugin_class

TIMEOUT = 120.0
"""Seconds that the plugins of one distribution may take to import."""
_CODE = """
from dovetail_console.probe import import_fault
for plugin in asked["plugins"]:
    answer(import_fault(*plugin))
"""


@attrs.frozen
class Probed:
    """The result of a plugin's trial import."""

    entry: Any
    """PluginEntry of the plugin."""
    status: str
    """`loadable` or `broken` after the import; the state in the index if nothing was imported, or only a requirement is missing."""
    reason: str | None
    fix: str | None


def probed(entries: Iterable[Any]) -> list[Probed]:
    """Import, in subprocesses, every plugin that is usable or in the state `conflict`, and return a result for each entry.

    The plugins of one distribution are imported in one process. An entry whose import fails only because a requirement is missing keeps
    its state.
    """
    entries = list(entries)
    groups: dict[str, list[Any]] = {}
    for entry in entries:
        if entry.usable or entry.state == "conflict":
            groups.setdefault(entry.distribution, []).append(entry)
    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
        found = [each for group in pool.map(_of_distribution, groups.values()) for each in group]
    by_plugin = {(p.entry.kind, p.entry.name, p.entry.distribution): p for p in found}
    return [
        by_plugin.get((e.kind, e.name, e.distribution)) or Probed(e, e.state, e.reason, e.fix)
        for e in entries
    ]


def import_fault(kind: str, name: str, distribution: str) -> tuple[str, str | None, bool] | None:
    """Import a plugin in this process. Return why the import fails, the fix, and whether only a requirement is missing; None on success."""
    try:
        load_plugin_class(PluginRef(kind=kind, name=name, distribution=distribution))
    except DovetailError as error:
        return error.message, error.hint, isinstance(error, PluginNeedsError)
    return None


def _of_distribution(entries: Sequence[Any]) -> list[Probed]:
    """Import the plugins of one distribution in order, in one subprocess. After a crash, continue with the next plugin in a new one."""
    found: list[Probed] = []
    while left := entries[len(found) :]:
        plugins = [(entry.kind, entry.name, entry.distribution) for entry in left]
        faults, ended = ask(_CODE, {"plugins": plugins}, timeout=TIMEOUT)
        if len(faults) < len(left):
            report = f"report it to the author of {left[0].distribution}"
            faults.append([f"its import ends the process: {ended}", report, False])
        found += [_with_fault(e, fault) for e, fault in zip(left, faults, strict=False)]
    return found


def _with_fault(entry: Any, fault: Sequence[Any] | None) -> Probed:
    cause, fix, needs = fault or (None, None, False)
    status = entry.state
    if entry.usable and not needs:
        status = "loadable" if fault is None else "broken"
    if needs:
        cause = fix = None
    return Probed(entry, status, entry.reason or cause, entry.fix or fix)
