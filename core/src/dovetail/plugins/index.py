"""PluginIndex: the installed plugins, found without importing them, and the plugin that a name selects."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from dovetail.errors import (
    PluginConflictError,
    PluginIncompatibleError,
    PluginNotFoundError,
    nearest,
)
from dovetail.plugins.catalogue import nearest_first_party, provider
from dovetail.plugins.distributions import Installed, installed_distributions
from dovetail.plugins.entry import PluginEntry, entries_of
from dovetail.plugins.kinds import KINDS, KINDS_GROUP, Kind
from dovetail.plugins.manifest import ManifestError, normalised, read_manifest

_OF_PRESETS = ("advantage", "policy_loss")
"""Kinds for which users often give the name of a preset, such as `dapo`."""


@dataclass(frozen=True)
class PluginIndex:
    """All installed plugins, including those that a config can't select.

    Attributes:
        all_entries: every declared plugin, sorted by kind and name.
        problems: messages about distributions that can't be read, and about kinds that are left out.
        distributions: the distributions with plugins or extensions.
        kinds: the kinds of plugin, by name: core's, and those of installed packages.
    """

    all_entries: tuple[PluginEntry, ...]
    problems: tuple[str, ...] = ()
    distributions: tuple[Installed, ...] = field(default=(), repr=False)
    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS, repr=False)

    @classmethod
    def discover(cls) -> PluginIndex:
        """Index the installed plugins without importing them. Broken plugins are listed with their state."""
        distributions, problems = installed_distributions()
        kinds, complaints = _kinds_of(distributions)
        entries = [e for distribution in distributions for e in entries_of(distribution, kinds)]
        order = {kind: i for i, kind in enumerate(kinds)}
        entries = sorted(
            _mark_conflicts(entries),
            key=lambda e: (order.get(e.kind, len(order)), e.kind, e.name, e.distribution),
        )
        return cls(tuple(entries), (*problems, *complaints), tuple(distributions), kinds)

    def entries(self, kind: str | None = None) -> tuple[PluginEntry, ...]:
        """Return the plugins of a kind in every state; without a kind, all plugins."""
        return tuple(entry for entry in self.all_entries if kind in (None, entry.kind))

    def kind(self, name: str) -> Kind:
        """Return the kind of plugin with this name.

        Raises:
            PluginNotFoundError: the kind does not exist; the error names the nearest one.
        """
        if name in self.kinds:
            return self.kinds[name]
        near = nearest(name, self.kinds)
        raise PluginNotFoundError(
            f"there is no plugin kind {name!r}; the kinds are {', '.join(sorted(self.kinds))}",
            hint=f"did you mean {near!r}?" if near else None,
        )

    def find(self, kind: str, name: str) -> PluginEntry:
        """Return the plugin that a name (`name`, an alias, or `name@distribution`) selects.

        Raises:
            PluginNotFoundError: no installed plugin has this name; the error lists the existing names and what to install.
            PluginConflictError: several distributions claim the name.
            PluginIncompatibleError: the plugin is made for another interface version, or has a wrong manifest.
        """
        self.kind(kind)
        bare, _, distribution = name.partition("@")
        claimants = self._claimants(kind, bare)
        if distribution:
            theirs = [
                c for c in claimants if normalised(c.distribution) == normalised(distribution)
            ]
            if claimants and not theirs:
                _refuse_distribution(kind, bare, distribution, claimants)
            claimants = theirs
        if not claimants:
            self._refuse_unknown(kind, bare, distribution)
        usable = [c for c in claimants if c.usable or c.state == "conflict"]
        if len(usable) > 1:
            _refuse_conflict(kind, bare, usable)
        if not usable:
            _refuse_unusable(kind, bare, claimants)
        return usable[0]

    def extensions(self, group: str) -> list[tuple[importlib.metadata.EntryPoint, Installed]]:
        """Return the entry points of a group in `EXTENSION_GROUPS`, each with its distribution."""
        return [
            (entry_point, distribution)
            for distribution in self.distributions
            for entry_point in distribution.entry_points
            if entry_point.group == group
        ]

    def _claimants(self, kind: str, name: str) -> list[PluginEntry]:
        named = [e for e in self.entries(kind) if e.name == name]
        return named or [e for e in self.entries(kind) if name in e.aliases]

    def _preset_named(self, name: str) -> str | None:
        """Return the usable preset with a name, ignoring case; None if there is none."""
        presets = (e.name for e in self.entries("preset") if e.usable)
        return next((known for known in presets if known.casefold() == name.casefold()), None)

    def _refuse_unknown(self, kind: str, name: str, distribution: str) -> NoReturn:
        usable = {e.name: e for e in self.entries(kind) if e.usable}
        message = f"no {kind} plugin is named {name!r}; installed: {', '.join(usable) or 'none'}"
        unusable = [e for e in self.entries(kind) if not e.usable]
        if unusable:
            message += "; not usable: " + ", ".join(
                f"{e.name} ({e.distribution} {e.version}, {e.state})" for e in unusable
            )
        elsewhere = sorted({e.kind for e in self.all_entries if e.name == name})
        if elsewhere:
            message += f"; a plugin of that name is of kind {', '.join(elsewhere)}"
        preset = self._preset_named(name) if kind in _OF_PRESETS else None
        near = nearest(name, [*usable, *(alias for e in usable.values() for alias in e.aliases)])
        home = provider(kind, name)
        installed = {normalised(d.name) for d in self.distributions}
        # `dovetail` on PyPI is another project; the distributions of this project are called dovetail-*.
        if distribution and normalised(distribution) not in {*installed, "dovetail"}:
            hint = f"pip install {distribution}"
        elif home:
            there = home.partition("[")[0] in installed
            hint = f"pip install {'--upgrade ' if there else ''}{shlex.quote(home)}"
        elif preset and (near is None or near.casefold() != name.casefold()):
            hint = f"{preset!r} is a preset, which sets the {kind} and other keys; set algorithm.preset={preset}"
        elif near:
            hint = f"did you mean {near!r}?"
        elif other := nearest_first_party(kind, name):
            command = f"pip install {shlex.quote(str(provider(kind, other)))}"
            hint = f"did you mean {other!r}? Install it: {command}"
        else:
            hint = (
                "install the package that provides the plugin, or give a file instead "
                "(path: my_plugin.py, attribute: MyClass); `dovetail plugins list` lists the installed plugins"
            )
        raise PluginNotFoundError(message, hint=hint)


@functools.cache
def default_index() -> PluginIndex:
    """Return the plugin index of this process, discovered once; `default_index.cache_clear()` discards it."""
    return PluginIndex.discover()


def _kinds_of(distributions: Sequence[Installed]) -> tuple[dict[str, Kind], list[str]]:
    """Return core's and the installed packages' kinds of plugin by name, and a message for each kind that is left out."""
    kinds, complaints = dict(KINDS), []
    for distribution in distributions:
        for entry_point in distribution.entry_points:
            if entry_point.group != KINDS_GROUP:
                continue
            title = f"the kind {entry_point.name!r} of {distribution.name} {distribution.version}"
            try:
                package = entry_point.value.partition(":")[0].partition(".")[0]
                declared = read_manifest(package, distribution.name).kinds
            except ManifestError as error:
                complaints.append(f"{title} is left out: {error.message}")
                continue
            found = next((kind for kind in declared if kind.name == entry_point.name), None)
            if found is None:
                complaints.append(f"{title} is left out: the manifest does not list the kind")
            elif found.name in kinds:
                complaints.append(f"{title} is left out: another kind has that name")
            else:
                kinds[found.name] = found
    return kinds, complaints


def _mark_conflicts(entries: Iterable[PluginEntry]) -> list[PluginEntry]:
    """Return the entries, with state `conflict` for compatible plugins of one kind and name in several distributions."""
    entries = list(entries)
    claims: dict[tuple[str, str], list[PluginEntry]] = {}
    for entry in entries:
        if entry.usable:
            claims.setdefault((entry.kind, entry.name), []).append(entry)
    marked = []
    for entry in entries:
        claimants = claims.get((entry.kind, entry.name), [])
        if entry.usable and len(claimants) > 1:
            others = [c for c in claimants if c is not entry]
            entry = dataclasses.replace(  # noqa: PLW2901 - the marked twin takes its place
                entry,
                state="conflict",
                reason="also claimed by "
                + ", ".join(f"{c.distribution} {c.version}" for c in others),
                fix=f"write name: {entry.name}@{entry.distribution}, or uninstall the others",
            )
        marked.append(entry)
    return marked


def _refuse_distribution(
    kind: str, name: str, distribution: str, claimants: list[PluginEntry]
) -> NoReturn:
    here = ", ".join(f"{c.distribution} {c.version}" for c in claimants)
    near = nearest(distribution, [c.distribution for c in claimants]) or claimants[0].distribution
    raise PluginNotFoundError(
        f"the distribution {distribution!r} has no {kind} plugin {name!r}; {name!r} comes from {here}",
        hint=f"write {name}@{near}, or {name} alone",
    )


def _refuse_conflict(kind: str, name: str, claimants: list[PluginEntry]) -> NoReturn:
    who = " and ".join(f"{c.distribution} {c.version}" for c in claimants)
    lines = " or ".join(f"name: {c.name}@{c.distribution}" for c in claimants)
    raise PluginConflictError(
        f"{kind} {name!r} is claimed by {len(claimants)} installed distributions: {who}",
        hint=f"write {lines}",
    )


def _refuse_unusable(kind: str, name: str, claimants: list[PluginEntry]) -> NoReturn:
    reasons = "; ".join(f"{c.distribution} {c.version} is {c.state}: {c.reason}" for c in claimants)
    fixes = list(dict.fromkeys(c.fix for c in claimants if c.fix))
    raise PluginIncompatibleError(
        f"{kind} plugin {name!r} is installed but can't be used: {reasons}",
        hint="; ".join(fixes) or None,
    )
