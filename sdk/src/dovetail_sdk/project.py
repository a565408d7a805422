"""A plugin package's source folder: plugins, extras and the code's location from its pyproject.toml."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path

import attrs

from dovetail.errors import PluginError, nearest
from dovetail.plugins.index import default_index
from dovetail.plugins.kinds import EXTENSION_GROUPS, GROUP_PREFIX, KINDS_GROUP


@attrs.frozen(kw_only=True)
class Declared:
    """One entry point, `name = target`, that declares a plugin of `kind`, or a kind of plugin. The target has the form `module:Class`."""

    kind: str
    name: str
    target: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


@attrs.frozen(kw_only=True)
class Project:
    """A package that declares plugins."""

    directory: Path
    distribution: str
    plugins: tuple[Declared, ...]
    kinds: tuple[Declared, ...] = ()
    """Kinds of plugin that the package declares; the `target` of each is the import path of the kind's interface."""
    package: str
    """The top-level package that holds all plugins; empty for a package without plugins."""
    package_directory: Path
    needs: tuple[tuple[str, ...], ...]
    """Requirements from the extras that install an engine, as `any_of_needs` returns: one of each inner tuple must be met."""
    isolated: bool = False
    """Whether its plugins need a Python environment of their own: `[tool.dovetail] isolated`."""


def read_project(directory: Path) -> Project:
    """Read what a package's source folder declares: its plugins, kinds and requirements.

    Raises:
        PluginError: pyproject.toml is missing or unusable, an entry point's group is unknown, or the package is not found.
    """
    file = directory / "pyproject.toml"
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PluginError(
            f"{directory} has no pyproject.toml", hint="name the folder of a plugin package"
        ) from error
    except (OSError, ValueError) as error:
        raise PluginError(f"{file} can't be read: {error}") from error
    project = data.get("project", {})
    if not isinstance(project.get("name"), str):
        raise PluginError(f"{file} has no [project] name")
    groups = project.get("entry-points", {})
    kinds = _declared("kind", groups.get(KINDS_GROUP, {}), file)
    plugins = _plugins(groups, {kind.name for kind in kinds}, file)
    packages = sorted({p.target.split(":")[0].split(".")[0] for p in (*kinds, *plugins)})
    if len(packages) > 1:
        raise PluginError(
            f"{file}: its plugins lie in several top-level packages: {', '.join(packages)}",
            hint="move the plugins into one package: a distribution has only one manifest",
        )
    package = packages[0] if packages else ""
    return Project(
        directory=directory,
        distribution=project["name"],
        plugins=plugins,
        kinds=kinds,
        package=package,
        package_directory=_package_directory(directory, package) if package else directory,
        needs=any_of_needs(project.get("optional-dependencies", {})),
        isolated=_isolated(data.get("tool", {}).get("dovetail", {}), file),
    )


def _isolated(table: Mapping[str, object], file: Path) -> bool:
    for key in table:
        if key != "isolated":
            raise PluginError(f"{file}: [tool.dovetail] has {key!r}; the only key is 'isolated'")
    value = table.get("isolated", False)
    if not isinstance(value, bool):
        raise PluginError(f"{file}: [tool.dovetail] isolated is {value!r}; expected true or false")
    return value


def any_of_needs(extras: Mapping[str, list[str]]) -> tuple[tuple[str, ...], ...]:
    """Return requirements that are met if and only if one of the extras `engine` or `engine-…` is completely installed.

    Each inner tuple lists alternatives: one requirement of every tuple must be met. The tuples are the Cartesian product of the
    extras' requirements.
    """
    engines = [
        list(requirements)
        for extra, requirements in sorted(extras.items())
        if (extra == "engine" or extra.startswith("engine-")) and requirements
    ]
    if not engines:
        return ()
    lists = {tuple(dict.fromkeys(choice)) for choice in itertools.product(*engines)}
    # A list that contains another list is redundant.
    minimal = [one for one in lists if not any(set(other) < set(one) for other in lists)]
    return tuple(sorted(minimal))


def _plugins(
    groups: Mapping[str, Mapping[str, str]], own_kinds: Collection[str], file: Path
) -> tuple[Declared, ...]:
    found: list[Declared] = []
    kinds = {*default_index().kinds, *own_kinds}
    for group, entries in groups.items():
        if not group.startswith(GROUP_PREFIX) or group in EXTENSION_GROUPS:
            continue
        kind = group.removeprefix(GROUP_PREFIX)
        if kind not in kinds:
            near = nearest(kind, kinds)
            raise PluginError(
                f"{file}: there is no entry-point group {group!r}",
                hint=f"did you mean {GROUP_PREFIX + near!r}?"
                if near
                else f"the kinds are {', '.join(sorted(kinds))}",
            )
        found += _declared(kind, entries, file)
    return tuple(sorted(found, key=lambda plugin: (plugin.kind, plugin.name)))


def _declared(kind: str, entries: Mapping[str, str], file: Path) -> tuple[Declared, ...]:
    """Return the entry points of one kind, sorted by name.

    Args:
        kind: the kind of plugin.
        entries: the targets by name.
        file: the pyproject.toml, for errors.

    Raises:
        PluginError: a target is not of the form module:Class.
    """
    found = [Declared(kind=kind, name=name, target=entries[name]) for name in sorted(entries)]
    for plugin in found:
        if ":" not in plugin.target:
            raise PluginError(
                f"{file}: the target {plugin.target!r} of the entry point {plugin} is not of the form module:Class"
            )
    return tuple(found)


def _package_directory(directory: Path, package: str) -> Path:
    for place in (directory / "src" / package, directory / package):
        if place.is_dir():
            return place
    raise PluginError(
        f"{directory}: its entry points name the package {package!r}, which is neither in src/ nor beside "
        "pyproject.toml",
        hint=f"create the folder {directory / 'src' / package}, or correct the entry points",
    )
