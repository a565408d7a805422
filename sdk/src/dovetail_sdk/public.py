"""Public names of core and of libraries: those in `dovetail/__init__.pyi`, in the `__init__.pyi` of each package that this file lists,
and in the `__init__.pyi` of each of `LIBRARIES`.

The docs page, `plugins check` and the repository's own lint read the names from this module.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import platform
from collections.abc import Collection, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import dovetail
from dovetail.errors import PluginBrokenError, nearest

LIBRARIES = (
    "dovetail_datasets",
    "dovetail_diagnosis",
    "dovetail_environments",
    "dovetail_gateway",
    "dovetail_inference",
    "dovetail_rollouts",
    "dovetail_serving",
    "dovetail_stages",
    "dovetail_torch_engines",
)
"""Packages that plugins may import like core: the names in each package's `__init__.pyi` and in its module `testing`."""


@cache
def public_names() -> dict[str, frozenset[str]]:
    """Return the public names by module: `{"dovetail.batch": {"Batch", …}, …}`.

    A package's public names are those in its `__init__.pyi`. A single module's public names are those that the module defines.
    """
    listed = {name: getattr(dovetail, name) for name in sorted(vars(dovetail)["__all__"])}
    modules = [value for value in listed.values() if inspect.ismodule(value)]
    functions = frozenset(name for name, value in listed.items() if not inspect.ismodule(value))
    libraries = [name for name in LIBRARIES if find_spec(name)]
    libraries += [name for lib in libraries if find_spec(name := f"{lib}.testing")]
    modules += map(importlib.import_module, libraries)
    return {"dovetail": functions | {"__version__"}} | {
        module.__name__: frozenset(
            module.__all__ if hasattr(module, "__path__") else _defined(module)
        )
        for module in modules
    }


def private_imports(directory: Path) -> list[str]:
    """Return a line `file:line: message` for each import, in a folder's files, of a non-public name of core or of a library of the project.

    Raises:
        PluginBrokenError: a file is not Python.
    """
    own = {directory.name, *(each.name for each in directory.iterdir())}
    return [
        f"{path}:{line}: {what}"
        for path in sorted(directory.rglob("*.py"))
        for line, what in _private(_parsed(path), own)
    ]


def check_imports(directory: Path) -> None:
    """Refuse a package that imports non-public names of core or of a library.

    Raises:
        PluginBrokenError: the package imports such names; the message lists every import.
    """
    found = private_imports(directory)
    if found:
        raise PluginBrokenError(
            "; ".join(found),
            hint='import public names from their package: the docs page "What is public" lists them',
        )


def first_paragraph(module: str, name: str) -> str:
    """Return the first paragraph of a public name's docstring; empty for a constant."""
    value: Any = getattr(importlib.import_module(module), name)
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return ""
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise PluginBrokenError(
            f"{path}:{error.lineno} is not Python {platform.python_version()}: {error.msg}",
            hint="correct the file, or leave it out of the package",
        ) from error


def _private(tree: ast.Module, own: Collection[str]) -> Iterator[tuple[int, str]]:
    public = public_names()
    roots = {"dovetail", *LIBRARIES} - set(own)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root, _, below = alias.name.partition(".")
                if below and root in roots and alias.name not in public:
                    yield node.lineno, f"{alias.name} is private"
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.partition(".")[0] not in roots:
                continue
            for alias in node.names:
                if f"{module}.{alias.name}" in public or alias.name in public.get(module, ()):
                    continue
                yield node.lineno, f"{module}.{alias.name} is private{_advice(module, alias.name)}"


def _advice(module: str, name: str) -> str:
    """Return a text with the package in which a name is public, or else the nearest public name; empty without either."""
    package = ".".join(module.split(".")[: 2 if module.startswith("dovetail.") else 1])
    homes = [home for home, names in public_names().items() if name in names]
    if homes:
        home = package if package in homes else homes[0]
        return f"; write `from {home} import {name}`"
    near = nearest(name, public_names().get(package, ()))
    return f"; the nearest public name is {package}.{near}" if near else ""


def _defined(module: ModuleType) -> set[str]:
    """Return the public names that a single module defines itself."""
    tree = ast.parse(inspect.getsource(module))
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return {name for name in names if not name.startswith("_")}
