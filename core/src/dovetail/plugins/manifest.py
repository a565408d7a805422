"""The manifest of a distribution, `dovetail-plugin.json`: a description of its plugins that needs no import."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.errors import PluginIncompatibleError
from dovetail.plugins.kinds import Kind

FILE_NAME = "dovetail-plugin.json"
SCHEMA = 1
COMMAND = "python -m dovetail_sdk manifest"
"""Command that writes a manifest."""

_OF_KINDS = ("name", "interface", "api", "section")
_TEXTS = ("kind", "name", "target", "api", "config")
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_TEXTS, (str,)),
    **dict.fromkeys(("aliases", "capabilities", "columns", "needs"), (list,)),
    **dict.fromkeys(("requires", "provides"), (list, type(None))),
    **dict.fromkeys(("config_schema", "settings", "facts"), (dict, type(None))),
    "doc": (str,),
    "isolated": (bool,),
}
_WORDS = {bool: "true or false", str: "text", list: "a list", dict: "an object", type(None): "null"}


class ManifestError(PluginIncompatibleError):
    """A manifest is missing or unusable; the hint says how to fix it."""


@dataclass(frozen=True)
class PluginManifest:
    """A plugin as the manifest of its distribution describes it."""

    kind: str
    name: str
    target: str
    """`module:Class`, as in the entry point."""
    api: str
    """Range of interface versions."""
    config: str
    """`module:Class` of the plugin's Config."""
    aliases: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    requires: tuple[str, ...] | None = ()
    """Columns that the plugin reads under its default config; None if it has no default config."""
    provides: tuple[str, ...] | None = ()
    """Columns that the plugin can write under its default config; None if it has no default config."""
    columns: tuple[Mapping[str, Any], ...] = ()
    """Columns that the plugin defines, each a mapping with the fields of `dovetail.batch.columns.Column`."""
    config_schema: Mapping[str, Any] | None = None
    """Description of the Config: `{"doc", "fields": [{"name", "type", "doc", "default" | "required", …}]}`."""
    doc: str = ""
    """The class's docstring; empty in manifests of earlier versions."""
    settings: Mapping[str, Any] | None = None
    """Settings that a preset applies under its default config; None for plugins of other kinds."""
    facts: Mapping[str, Any] | None = None
    """Further facts, which depend on the kind: `aggregation` of a policy loss or an estimator, `action` of a sample filter,
    `min_group_size` of an estimator under its default config; None if there are none."""
    needs: tuple[tuple[str, ...], ...] = ()
    """Lists of alternative requirements; the plugin's environment must meet one requirement of each list."""
    isolated: bool = False
    """Whether the plugin's needs rarely fit the environment of other plugins, so that its role gets an environment of its own
    (`runtime.environments`). From `[tool.dovetail] isolated = true` in pyproject.toml."""


@dataclass(frozen=True)
class DistributionManifest:
    """The manifest of a distribution: its plugins and its kinds of plugin."""

    path: Path
    distribution: str
    plugins: tuple[PluginManifest, ...]
    kinds: tuple[Kind, ...] = ()
    """Kinds of plugin that the distribution adds."""

    def get(self, kind: str, name: str) -> PluginManifest | None:
        """Return the plugin of a kind and a name; None if the manifest does not list it."""
        for plugin in self.plugins:
            if (plugin.kind, plugin.name) == (kind, name):
                return plugin
        return None


def normalised(distribution: str) -> str:
    """Return a distribution's name in the form in which package indexes compare names."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def package_directories(package: str) -> list[Path]:
    """Return the directories of a top-level package, without importing the package; empty if it does not exist.

    Works for wheels and editable installs, unlike RECORD and `importlib.resources`.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, AttributeError, ValueError):
        return []
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(place) for place in spec.submodule_search_locations]


def read_manifest(package: str, distribution: str) -> DistributionManifest:
    """Read the manifest of a distribution from one of its top-level packages.

    Raises:
        ManifestError: the manifest is missing, can't be read, or belongs to another distribution.
    """
    places = package_directories(package)
    if not places:
        raise ManifestError(
            f"the entry point of {distribution} names the package {package!r}, which can't be found",
            hint=f"reinstall it: pip install --force-reinstall --no-deps {distribution}",
        )
    for place in places:
        path = place / FILE_NAME
        if path.is_file():
            return read_manifest_file(path, distribution)
    raise ManifestError(
        f"the distribution {distribution} has no {FILE_NAME} in its package {package!r}",
        hint=f"the package's author writes the file with `{COMMAND}` in the source folder "
        "(after `pip install dovetail-sdk`) and ships it",
    )


def read_manifest_file(path: Path, distribution: str) -> DistributionManifest:
    """Read the `dovetail-plugin.json` of a distribution from this path.

    Raises:
        ManifestError: the manifest can't be read, or belongs to another distribution.
    """
    remake = f"write it again in the source folder of {distribution}: {COMMAND}"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ManifestError(f"the manifest {path} can't be read: {error}", hint=remake) from error
    if not isinstance(data, dict):
        raise ManifestError(f"the manifest {path} is not a JSON object", hint=remake)
    if data.get("schema") != SCHEMA:
        raise ManifestError(
            f"the manifest {path} has schema {data.get('schema')!r}; this dovetail-core reads schema {SCHEMA}",
            hint=f"upgrade dovetail-core, or {remake}",
        )
    owner = data.get("distribution")
    if not isinstance(owner, str) or normalised(owner) != normalised(distribution):
        raise ManifestError(
            f"the manifest {path} belongs to the distribution {owner!r}, not to {distribution!r}",
            hint=remake,
        )
    plugins = data.get("plugins")
    if not isinstance(plugins, list):
        raise ManifestError(f"the manifest {path} is wrong: `plugins` must be a list", hint=remake)
    try:
        kinds = tuple(
            Kind(**{key: str(kind[key]) for key in _OF_KINDS}) for kind in data.get("kinds", [])
        )
        return DistributionManifest(path, owner, tuple(_plugin(item) for item in plugins), kinds)
    except (TypeError, ValueError, KeyError) as error:
        raise ManifestError(f"the manifest {path} is wrong: {error}", hint=remake) from error


def _plugin(item: object) -> PluginManifest:
    """Build the entry of one plugin; raise TypeError for a field of the wrong type."""
    if not isinstance(item, dict):
        raise TypeError(f"an entry of `plugins` is {item!r}, not an object")
    for key, types in _TYPES.items():
        value = item.get(key, None if type(None) in types else types[0]())
        if not isinstance(value, types) or (key in _TEXTS and key not in item):
            allowed = " or ".join(_WORDS[tp] for tp in types)
            raise TypeError(
                f"plugin {item.get('kind')}/{item.get('name')}: `{key}` must be {allowed}, "
                f"not {item.get(key)!r}"
            )
    for need in item.get("needs", []):
        if not (isinstance(need, list) and need and all(isinstance(n, str) for n in need)):
            raise TypeError(f"an item of `needs` must be a list of requirements, not {need!r}")
    return PluginManifest(
        **{key: item[key] for key in _TEXTS},
        aliases=tuple(str(alias) for alias in item.get("aliases", [])),
        capabilities=tuple(str(capability) for capability in item.get("capabilities", [])),
        requires=_names(item.get("requires", [])),
        provides=_names(item.get("provides", [])),
        columns=tuple(item.get("columns", [])),
        config_schema=item.get("config_schema"),
        doc=item.get("doc", ""),
        settings=item.get("settings"),
        facts=item.get("facts"),
        needs=tuple(tuple(need) for need in item.get("needs", [])),
        isolated=item.get("isolated", False),
    )


def _names(columns: list[Any] | None) -> tuple[str, ...] | None:
    return None if columns is None else tuple(str(column) for column in columns)
