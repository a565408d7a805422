"""DrivenEngine: the releases of an engine that a plugin supports, and checks of the installed release."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from logging import Logger
from pathlib import Path

import attrs
from packaging.version import InvalidVersion, Version

from dovetail.errors import PluginNeedsError


@attrs.frozen
class Release:
    """The installed release of an engine."""

    distribution: str
    version: str

    @property
    def number(self) -> Version:
        """The version, parsed for comparison, without a local suffix such as `+cu128`; an invalid version counts as 0."""
        return number_of(self.version)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def number_of(version: str) -> Version:
    """Return a version, parsed for comparison, without a local suffix such as `+cu128`; an invalid version counts as 0."""
    try:
        return Version(Version(version).public)
    except InvalidVersion:
        return Version("0")


@attrs.frozen
class DrivenEngine:
    """The engine package that a plugin uses, with the supported releases. The engine itself is not imported.

    Attributes:
        title: the engine's official spelling, such as `vLLM`.
        package: the name of the engine's Python package, such as `vllm`.
        distributions: the names of the distributions that contain the package.
        plugin: the plugin's package, whose imports determine the names that the engine must have.
        oldest: the oldest release that the plugin supports.
        newest: the newest release that the plugin was tested with.
        lacks: what releases before `oldest` can't do, as a clause of the error.
    """

    title: str
    package: str
    distributions: tuple[str, ...]
    plugin: str
    oldest: Version
    newest: Version
    lacks: str

    def installed(self) -> Release | None:
        """Return the installed release of the engine, or None."""
        for distribution in self.distributions:
            try:
                return Release(distribution, importlib.metadata.version(distribution))
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def require(self, install: str, logger: Logger | None = None) -> None:
        """Check that an installed release of the engine is supported.

        Args:
            install: the command that installs a supported release.
            logger: the logger for a warning about a release newer than `newest`.

        Raises:
            PluginNeedsError: the engine is missing, too old, or lacks names that the plugin imports.
        """
        release = self.installed()
        needs = f"rollout {self.package!r} needs {self.title}"
        if release is None:
            raise PluginNeedsError(f"{needs}, which is not installed", hint=install)
        if release.number < self.oldest:
            raise PluginNeedsError(
                f"{needs} {self.oldest} or newer, but {release} is installed: {self.lacks}",
                hint=f"{install} --upgrade",
            )
        if importlib.util.find_spec(self.package) is None:
            raise PluginNeedsError(
                f"{release} is registered as installed, but its package `{self.package}` is missing",
                hint=f"{install} --force-reinstall",
            )
        if gone := self.missing_names():
            raise PluginNeedsError(
                f"{needs} with {', '.join(gone)}, which {release} lacks: {self.tried}",
                hint=f"install a tested release: {install}",
            )
        if logger is not None and self.untried(release):
            logger.warning("the installed %s is untested: %s", release, self.tried)

    @property
    def tried(self) -> str:
        """A clause that names the tested releases, for messages."""
        return f"this plugin was tested with {self.title} {self.oldest} to {self.newest}"

    def untried(self, release: Release) -> bool:
        """Return whether a release is newer than `newest`; if `newest` is 0.24, then 0.24.1 is not newer."""
        newest = self.newest.release
        return release.number.release[: len(newest)] > newest

    def missing_names(self) -> tuple[str, ...]:
        """Return the names, as `MODULE.NAME`, that the plugin's modules import from the engine but the installed release's sources lack."""
        return missing_names(_directory(self.plugin), _directory(self.package))

    def defines(self, module: str, name: str) -> bool:
        """Return whether a module of the installed engine defines a name, according to its source file."""
        return _defines(_directory(self.package).parent, module, name)


def missing_names(plugin: Path, package: Path) -> tuple[str, ...]:
    """Return the names that a plugin's modules import from an engine's package but the package's sources do not define.

    Args:
        plugin: the directory of the plugin's package.
        package: the directory of the engine's package, named like the package.
    """
    missing: set[str] = set()
    for file in sorted(plugin.rglob("*.py")):
        for module, name in _imports(ast.parse(file.read_text("utf-8")), package.name):
            if not _defines(package.parent, module, name):
                missing.add(f"{module}.{name}" if name else module)
    return tuple(sorted(missing))


def _directory(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise PluginNeedsError(
            f"the package `{package}` has no importable files in this Python environment",
            hint="reinstall the package",
        )
    return Path(spec.submodule_search_locations[0])


def _imports(tree: ast.Module, package: str) -> Iterator[tuple[str, str]]:
    """Yield every import of a package in a module, also inside functions: the imported module, and the name in it or an empty string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found = [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        else:
            continue
        yield from (one for one in found if one[0].partition(".")[0] == package)


def _defines(root: Path, module: str, name: str) -> bool:
    """Return whether the sources below a directory contain a module, and the module defines a name."""
    path = root.joinpath(*module.split("."))
    package = path / "__init__.py"
    file = package if package.is_file() else path.with_suffix(".py")
    if not file.is_file():
        return path.is_dir() and (not name or _defines(root, f"{module}.{name}", ""))
    if not name or _defines(root, f"{module}.{name}", ""):
        return True
    text = file.read_text("utf-8")
    nodes = list(_outer(ast.parse(text))) if name in text or "import *" in text else []
    if any(name in _bound(node) for node in nodes):
        return True
    parents = module.split(".") if file == package else module.split(".")[:-1]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            base = parents[: len(parents) + 1 - node.level] if node.level else []
            if _defines(root, ".".join([*base, *filter(None, [node.module])]), name):
                return True
    return False


def _outer(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _outer(node)


def _bound(node: ast.AST) -> tuple[object, ...]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return (node.name,)
        case ast.Import() | ast.ImportFrom():
            return tuple(alias.asname or alias.name for alias in node.names)
        case ast.Name(ctx=ast.Store()):
            return (node.id,)
        case ast.Constant():
            return (node.value,)
    return ()
