"""PluginEntry: a plugin in the index; and the checks that decide its state."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dovetail.errors import nearest
from dovetail.plugins.distributions import Installed
from dovetail.plugins.kinds import EXTENSION_GROUPS, GROUP_PREFIX, Kind
from dovetail.plugins.manifest import (
    COMMAND,
    DistributionManifest,
    ManifestError,
    PluginManifest,
    read_manifest,
)
from dovetail.plugins.needs import Need, install_command, judge

State = Literal["compatible", "rejected", "conflict", "invalid"]
"""State of a plugin, known without importing it. `rejected`: made for another interface version or Python. `conflict`: several
distributions have a compatible plugin of this name. `invalid`: entry point or manifest are wrong or disagree."""
STATES: tuple[State, ...] = ("compatible", "rejected", "conflict", "invalid")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class PluginEntry:
    """A plugin that an installed distribution declares, with its state: `compatible`, or why a config can't select the plugin."""

    kind: str
    name: str
    distribution: str
    version: str
    target: str
    """`module:Class` of the plugin."""
    state: State
    reason: str | None = None
    """Why the plugin is not compatible; None if it is."""
    fix: str | None = None
    """How to make the plugin compatible."""
    manifest: PluginManifest | None = None
    entry_point: importlib.metadata.EntryPoint | None = None
    """Entry point of the plugin; None if only the manifest lists the plugin."""

    @property
    def title(self) -> str:
        """Name of the plugin in messages."""
        return f"{self.kind}/{self.name} ({self.distribution} {self.version})"

    @property
    def usable(self) -> bool:
        """Whether the plugin is compatible, so that a config may select it."""
        return self.state == "compatible"

    @property
    def interface(self) -> str:
        """The range of interface versions that the plugin works with; empty if unknown."""
        return self.manifest.api if self.manifest else ""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further names that select the plugin."""
        return self.manifest.aliases if self.manifest else ()

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The plugin's optional abilities beyond the interface."""
        return self.manifest.capabilities if self.manifest else ()

    @property
    def needs(self) -> tuple[Need, ...]:
        """The packages that the plugin needs, checked against this environment."""
        return judge(self.manifest.needs) if self.manifest else ()

    @property
    def install_command(self) -> str:
        """The command that installs the needed packages that this environment lacks."""
        return install_command(self.distribution, self.needs)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON values, as `plugins list --json` prints it."""
        return {
            "kind": self.kind,
            "name": self.name,
            "aliases": list(self.aliases),
            "state": self.state,
            "reason": self.reason,
            "fix": self.fix,
            "distribution": self.distribution,
            "version": self.version,
            "interface": self.interface,
            "capabilities": list(self.capabilities),
            "needs": [
                {"any_of": list(n.any_of), "met": n.met, "found": n.found} for n in self.needs
            ],
            "isolated": self.manifest is not None and self.manifest.isolated,
            "target": self.target,
        }


class Rejection(Exception):
    """The refusal of a plugin by a check: the plugin's state, the reason and the fix."""

    def __init__(self, state: State, reason: str, fix: str | None) -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason
        self.fix = fix


def entries_of(distribution: Installed, kinds: Mapping[str, Kind]) -> list[PluginEntry]:
    """Return an entry for every plugin of a distribution, each with its state.

    Args:
        distribution: the installed distribution.
        kinds: all kinds of plugin, by name.
    """
    manifests: dict[str, DistributionManifest | ManifestError] = {}
    entries = []
    for entry_point in distribution.entry_points:
        if entry_point.group in EXTENSION_GROUPS:
            continue
        entries.append(_entry(entry_point, distribution, manifests, kinds))
    declared = {(entry.kind, entry.name) for entry in entries}
    for manifest in manifests.values():
        if isinstance(manifest, DistributionManifest):
            entries += [
                _only_in_manifest(plugin, distribution)
                for plugin in manifest.plugins
                if (plugin.kind, plugin.name) not in declared
            ]
    return entries


def _entry(
    entry_point: importlib.metadata.EntryPoint,
    distribution: Installed,
    manifests: dict[str, DistributionManifest | ManifestError],
    kinds: Mapping[str, Kind],
) -> PluginEntry:
    kind, name = entry_point.group.removeprefix(GROUP_PREFIX), entry_point.name
    plugin: PluginManifest | None = None
    state: State = "compatible"
    reason = fix = None
    try:
        _check_declaration(kind, name, entry_point.value, kinds)
        package = entry_point.value.split(":")[0].split(".")[0]
        if package not in manifests:
            manifests[package] = _manifest_or_error(package, distribution.name)
        plugin = _agreeing(manifests[package], kind, name, entry_point.value, distribution)
        _check_interface(plugin, distribution, kinds[kind].api)
    except Rejection as verdict:
        state, reason, fix = verdict.state, verdict.reason, verdict.fix
    return PluginEntry(
        kind=kind,
        name=name,
        distribution=distribution.name,
        version=distribution.version,
        target=entry_point.value,
        state=state,
        reason=reason,
        fix=fix,
        manifest=plugin,
        entry_point=entry_point,
    )


def _check_declaration(kind: str, name: str, target: str, kinds: Mapping[str, Kind]) -> None:
    """Raise Rejection if the group, name or target of an entry point is not valid."""
    if kind not in kinds:
        near = nearest(kind, [*kinds, *(g.removeprefix(GROUP_PREFIX) for g in EXTENSION_GROUPS)])
        raise Rejection(
            "invalid",
            f"{GROUP_PREFIX + kind!r} is not an entry-point group that dovetail-core or an installed package knows",
            f"if the plugin's author meant the group {GROUP_PREFIX + near!r}, correct pyproject.toml"
            if near
            else f"the kinds of plugin are {', '.join(sorted(kinds))}",
        )
    if not _NAME.fullmatch(name):
        raise Rejection(
            "invalid",
            f"{name!r} is not a valid plugin name",
            "use lower-case letters, digits and underscores, beginning with a letter",
        )
    if not _TARGET.fullmatch(target):
        raise Rejection(
            "invalid",
            f"the entry point's target {target!r} is not of the form module:Class",
            "correct the entry point in pyproject.toml",
        )


def _manifest_or_error(package: str, distribution: str) -> DistributionManifest | ManifestError:
    try:
        return read_manifest(package, distribution)
    except ManifestError as error:
        return error


def _agreeing(
    manifest: DistributionManifest | ManifestError,
    kind: str,
    name: str,
    target: str,
    distribution: Installed,
) -> PluginManifest:
    """Return the manifest's entry for an entry point; raise Rejection if manifest and entry point disagree."""
    if isinstance(manifest, ManifestError):
        raise Rejection("invalid", manifest.message, manifest.hint)
    remake = f"write the manifest again in the source folder of {distribution.name}: {COMMAND}"
    plugin = manifest.get(kind, name)
    if plugin is None:
        others = [other.kind for other in manifest.plugins if other.target == target]
        reason = (
            f"the manifest says that {target} is of kind {others[0]!r}, but the entry point says {kind!r}"
            if others and kind not in others
            else f"the manifest {manifest.path} does not list the plugin"
        )
        raise Rejection("invalid", reason, remake)
    if plugin.target != target:
        raise Rejection(
            "invalid",
            f"the manifest gives the target {plugin.target}, but the entry point gives {target}",
            remake,
        )
    return plugin


def _check_interface(plugin: PluginManifest, distribution: Installed, provided: str) -> None:
    """Raise Rejection if a plugin excludes this core's interface version, `provided`, or this Python, or if its range is invalid.

    The packages that a plugin needs are not checked here, but where the plugin runs, since they may differ between hosts.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        accepted = SpecifierSet(plugin.api)
    except InvalidSpecifier:
        raise Rejection(
            "invalid",
            f"the plugin's api {plugin.api!r} is not a version range",
            'write a range such as api = ">=1.0,<2"',
        ) from None
    if not accepted.contains(provided, prereleases=True):
        raise Rejection(
            "rejected",
            f"the plugin is made for the {plugin.kind} interface {plugin.api}; this dovetail-core has {provided}",
            f"pip install --upgrade {distribution.name} dovetail-core",
        )
    python = platform.python_version()
    if distribution.requires_python is None:
        return
    try:
        fits = SpecifierSet(distribution.requires_python).contains(python, prereleases=True)
    except InvalidSpecifier:
        return
    if not fits:
        raise Rejection(
            "rejected",
            f"the plugin needs Python {distribution.requires_python}; this is Python {python}",
            "use another Python, or another version of the plugin",
        )


def _only_in_manifest(plugin: PluginManifest, distribution: Installed) -> PluginEntry:
    return PluginEntry(
        kind=plugin.kind,
        name=plugin.name,
        distribution=distribution.name,
        version=distribution.version,
        target=plugin.target,
        state="invalid",
        reason="the manifest lists the plugin, but no installed entry point does",
        fix=f"entry points are written at installation: install {distribution.name} again",
        manifest=plugin,
    )
