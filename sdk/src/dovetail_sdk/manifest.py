"""Derives `dovetail-plugin.json` from a package's plugin classes, writes it, and checks it for drift."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from dovetail.batch import Column
from dovetail.config.presets import plain_settings
from dovetail.errors import DovetailError, PluginBrokenError, PluginError, nearest
from dovetail.interfaces import AdvantageEstimator, ColumnPlugin, Plugin, Stage
from dovetail.plugins.contract import check_class, config_of, public_module
from dovetail.plugins.index import default_index
from dovetail.plugins.kinds import Kind
from dovetail.plugins.load import cause_of
from dovetail.plugins.manifest import COMMAND, FILE_NAME, SCHEMA
from dovetail.sections import PluginSection, PresetSection
from dovetail_console.plugin_page import PAPER, doc_and_example
from dovetail_sdk.config_schema import config_schema
from dovetail_sdk.manifest_differences import differences
from dovetail_sdk.project import Declared, Project

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def derive(project: Project) -> dict[str, Any]:
    """Return a package's manifest, derived from the plugin classes in its source folder.

    Raises:
        PluginError: a plugin class can't be imported, is incomplete or contradicts its entry point, or its Config has positional or
            undocumented fields. The message lists every problem.
    """
    _import_from_source(project)
    plugins, complaints = [], []
    kinds = {declared.name: _kind(declared) for declared in project.kinds}
    for declared in project.plugins:
        kind = kinds.get(declared.kind) or default_index().kind(declared.kind)
        try:
            plugins.append(describe(declared, project, kind))
        except DovetailError as error:
            complaints.append(str(error))
    complaints += _clashes(plugins)
    if complaints:
        listed = "\n".join("- " + text.replace("\n", "\n  ") for text in complaints)
        count = "1 plugin" if len(complaints) == 1 else f"{len(complaints)} plugins"
        raise PluginError(f"{project.distribution}: {count} can't be described\n{listed}")
    brought = {"kinds": [dataclasses.asdict(kind) for kind in kinds.values()]} if kinds else {}
    return {"schema": SCHEMA, "distribution": project.distribution, **brought, "plugins": plugins}


def manifest_path(project: Project) -> Path:
    """Return the path of the manifest, which is inside the package, so that wheels contain it."""
    return project.package_directory / FILE_NAME


def to_text(manifest: Mapping[str, Any]) -> str:
    """Return the manifest as JSON text, as `write` stores it."""
    return json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"


def write(project: Project) -> Path:
    """Derive the manifest and write it. For errors see `derive`."""
    path = manifest_path(project)
    path.write_text(to_text(derive(project)), encoding="utf-8")
    return path


def drift(project: Project) -> list[str]:
    """Return the differences between the committed manifest and the plugin classes, if any. For errors see `derive`."""
    path = manifest_path(project)
    derived = derive(project)
    try:
        text = path.read_text(encoding="utf-8")
        committed = json.loads(text)
    except FileNotFoundError:
        return [f"{path} does not exist"]
    except (OSError, ValueError) as error:
        return [f"{path} can't be read: {error}"]
    if text == to_text(derived):
        return []
    if not isinstance(committed, dict):
        return [f"{path} is not a JSON object"]
    return differences(committed, derived) or [f"{path} is written in another order or layout"]


def _import_from_source(project: Project) -> None:
    """Import the package, and check that it is imported from the source folder."""
    root = str(project.package_directory.parent.resolve())
    if root not in sys.path:
        sys.path.insert(0, root)
        importlib.invalidate_caches()
    try:
        package = importlib.import_module(project.package)
    except (Exception, SystemExit) as error:
        raise PluginBrokenError(
            f"{project.distribution}: the package {project.package!r} can't be imported: {_cause(error)}"
        ) from error
    places = [Path(place).resolve() for place in package.__path__]
    if project.package_directory.resolve() not in places:
        raise PluginError(
            f"the package {project.package!r} is imported from {places[0]}, not from {project.package_directory}",
            hint=f"in a new shell in the package's source folder, run: {COMMAND}",
        )


def _kind(declared: Declared) -> Kind:
    """Return a kind that the package adds, from its interface.

    Raises:
        PluginError: the interface can't be imported, is not a subclass of Plugin, or has no `interface_api`.
    """
    interface = _target(declared)
    if not (isinstance(interface, type) and issubclass(interface, Plugin)):
        raise PluginError(
            f"{declared.target}, the target of the entry point {declared}, is not a subclass of Plugin"
        )
    api = getattr(interface, "interface_api", None)
    if not isinstance(api, str):
        raise PluginError(
            f"the interface {declared.target} has no `interface_api`",
            hint='set its version in the class: interface_api = "1.0"',
        )
    section = f"{public_module(interface.Config)}:{interface.Config.__qualname__}"
    return Kind(declared.name, declared.target, api, section)


def describe(declared: Declared, project: Project, kind: Kind) -> dict[str, Any]:
    """Derive a plugin's entry in the manifest from the plugin's class.

    Raises:
        DovetailError: the class can't be imported, is incomplete or contradicts its entry point, or its Config has positional or
            undocumented fields.
    """
    cls = check_class(_target(declared), kind, f"{declared.target} ({declared})")
    _check_attributes(declared, cls, kind)
    config = config_of(cls, kind)
    default = _default_config(config, declared)
    return {
        "kind": declared.kind,
        "name": declared.name,
        "aliases": list(cls.aliases),
        "target": declared.target,
        "doc": _doc(cls, project),
        "api": cls.api,
        "capabilities": sorted(cls.capabilities),
        "requires": _columns(cls, "requires", default),
        "provides": _columns(cls, "provides", default),
        "columns": [_column(column) for column in cls.columns],
        "config": f"{public_module(config)}:{config.__qualname__}",
        "config_schema": config_schema(config),
        **_settings(default),
        **_facts(cls, default),
        "needs": [list(any_of) for any_of in project.needs],
        **({"isolated": True} if project.isolated else {}),
    }


def _doc(cls: type[Plugin], project: Project) -> str:
    """Return the class's docstring, preceded by the first paragraph of its module if only that names the paper.

    The docstring of a module with several plugins is not used, since it describes none of them alone.
    """
    own = inspect.cleandoc(cls.__doc__ or "")
    try:
        doc_and_example(own)
    except ValueError as error:
        raise PluginError(f"{cls.__module__}.{cls.__qualname__}: {error}") from error
    plugins_there = [p for p in project.plugins if p.target.partition(":")[0] == cls.__module__]
    if PAPER.search(own) or len(plugins_there) > 1:
        return own
    module = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")
    first = module.split("\n\n")[0]
    return f"{first}\n\n{own}".strip() if PAPER.search(first) else own


def _settings(default: PluginSection | None) -> dict[str, Any]:
    """Return `{"settings": …}` with a preset's default settings; {} for plugins of other kinds."""
    if not isinstance(default, PresetSection):
        return {}
    try:
        return {"settings": plain_settings(default)}
    except ValueError as error:
        raise PluginBrokenError(str(error)) from error


def _facts(cls: type[Plugin], default: PluginSection | None) -> dict[str, Any]:
    """Return `{"facts": …}` with what readers of a config need to know besides settings and columns, such as a stage's phase; or {}."""
    found = {key: getattr(cls, key, None) for key in ("aggregation", "action")}
    if issubclass(cls, Stage):
        found["phase"] = cls.phase
    if issubclass(cls, AdvantageEstimator) and default is not None:
        try:
            found["min_group_size"] = cls.min_group_size(default)
        except Exception as error:
            raise PluginBrokenError(
                f"{cls.__module__}.{cls.__qualname__} fails in `min_group_size` with its default config: {_cause(error)}"
            ) from error
    facts = _without_none(found)
    return {"facts": facts} if facts else {}


def _target(declared: Declared) -> object:
    module_name, _, attribute = declared.target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        hint = None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            hint = "write the missing module, or correct the entry point in pyproject.toml"
        elif missing:
            hint = (
                f"install the package that provides {missing!r} in the environment that writes the manifest; if it is a heavy "
                "engine, import it in the plugin's `start` instead"
            )
        raise PluginBrokenError(
            f"{declared.target} ({declared}) can't be imported: {_cause(error)}", hint=hint
        ) from error
    if not hasattr(module, attribute):
        own = [name for name in vars(module) if not name.startswith("_")]
        near = nearest(attribute, own)
        raise PluginBrokenError(
            f"the module {module_name} has no {attribute!r}, which the entry point {declared} names",
            hint=f"did you mean {near!r}?" if near else "correct the entry point in pyproject.toml",
        )
    return getattr(module, attribute)


def _check_attributes(declared: Declared, cls: type[Plugin], kind: Kind) -> None:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    title = f"{declared.target} ({declared})"
    if not _NAME.fullmatch(declared.name):
        raise PluginError(
            f"the entry point of {declared.target} is called {declared.name!r}, which is not a valid plugin name",
            hint="use lower-case letters, digits and underscores, with a letter at the start",
        )
    if getattr(cls, "name", None) != declared.name:
        raise PluginError(
            f"{title} has name = {getattr(cls, 'name', None)!r}, but its entry point is called {declared.name!r}",
            hint="make the two names equal",
        )
    api = getattr(cls, "api", None)
    try:
        valid = isinstance(api, str) and bool(SpecifierSet(api))
    except InvalidSpecifier:
        valid = False
    if not valid:
        here = kind.api
        raise PluginError(
            f"{title} has api = {api!r}, which is not a version range",
            hint=f'write the interface versions that it works with: api = ">={here},<{int(here.split(".")[0]) + 1}"',
        )
    for alias in cls.aliases:
        if not alias or "@" in alias or any(letter.isspace() for letter in alias):
            raise PluginError(
                f"{title} has the alias {alias!r}; expected text without spaces and without '@'",
                hint="rename the alias: the character '@' separates a plugin's name from its distribution",
            )


def _default_config(config: type[PluginSection], declared: Declared) -> PluginSection | None:
    """Return the config with all defaults; None if a field has no default, or the defaults are invalid together."""
    positional = [field.name for field in attrs.fields(config) if not field.kw_only]
    if positional:
        raise PluginError(
            f"{config.__module__}.{config.__qualname__} has the positional fields {', '.join(positional)}; expected keyword-only fields",
            hint="write @attrs.frozen(kw_only=True) above the class",
        )
    if any(field.default is attrs.NOTHING and field.init for field in attrs.fields(config)):
        return None
    try:
        return config(name=declared.name)
    except ValueError:
        return None


def _columns(
    cls: type[Plugin], method: Literal["requires", "provides"], default: PluginSection | None
) -> list[str] | None:
    """Return the columns that the plugin requires or provides (`method`) with its default config; [] if it declares no columns.

    None if there is no default config, or for a stage, whose columns depend on the plan.
    """
    if issubclass(cls, Stage):
        return None
    if not issubclass(cls, ColumnPlugin):
        return []
    if default is None:
        return None
    try:
        return sorted(getattr(cls, method)(default))
    except Exception as error:
        raise PluginBrokenError(
            f"{cls.__module__}.{cls.__qualname__} fails in `{method}` with its default config: {_cause(error)}"
        ) from error


def _clashes(plugins: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return an error message for each name or alias that two plugins of one kind share."""
    owners: dict[tuple[str, str], str] = {}
    complaints = []
    for plugin in plugins:
        for name in (plugin["name"], *plugin["aliases"]):
            other = owners.setdefault((plugin["kind"], name), plugin["name"])
            if other != plugin["name"]:
                complaints.append(
                    f"{plugin['kind']} {name!r} selects both {other!r} and {plugin['name']!r}"
                )
    return complaints


def _column(column: Column) -> dict[str, Any]:
    described = _without_none(dataclasses.asdict(column))
    return {key: value for key, value in described.items() if key != "inner" or value}


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _cause(error: BaseException) -> str:
    return cause_of(error, own=Path(__file__).parent)
