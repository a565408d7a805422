"""Loads a plugin from a Python file instead of a package, under the same checks as an installed plugin."""

from __future__ import annotations

import copyreg
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import attrs

from dovetail.errors import ConfigError, PluginBrokenError, PluginNotFoundError, nearest
from dovetail.interfaces.plugin import Plugin
from dovetail.plugins.catalogue import OF_FUNCTIONS
from dovetail.plugins.contract import check_api, check_class, import_object, with_article
from dovetail.plugins.exit_guard import no_exit
from dovetail.plugins.index import default_index
from dovetail.plugins.kinds import FUNCTIONS_GROUP, Kind

_loaded: dict[Path, tuple[str, types.ModuleType]] = {}
"""File → (SHA-256 of its content, module): unchanged content gives the same classes."""
_named_here: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that define no `name`, and were given the name of the attribute that holds them in the file."""
_folders: set[Path] = set()
"""Folders of all plugin files that were run."""
_locks: dict[Path, threading.RLock] = {}
"""File → the lock under which the file is run, so that two threads do not make two modules of one file. Each file has its own lock,
since a running file may wait for a thread that loads another file."""
_locks_lock = threading.Lock()
"""Lock of `_locks`; never held while a file runs."""


def resolve(path: str) -> Path:
    """Return the absolute path of a plugin file.

    Raises:
        PluginNotFoundError: the file does not exist.
    """
    place = Path(path).expanduser().resolve()
    if place.is_file():
        return place
    beside = sorted(p.name for p in place.parent.glob("*.py")) if place.parent.is_dir() else []
    near = nearest(place.name, beside)
    what = "is a folder, not a file" if place.is_dir() else "does not exist"
    raise PluginNotFoundError(
        f"the plugin file {path!r} {what} (looked at {place})",
        hint=f"did you mean {near!r}?" if near else "give the path of a Python file",
    )


def content_hash(path: Path) -> str:
    """Return the SHA-256 digest of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_file_attribute(path: str, attribute: str) -> Any:
    """Run a Python file and return one of its attributes; a file with unchanged content is run once.

    Raises:
        PluginNotFoundError: the file or the attribute does not exist; the error names the nearest one.
        PluginBrokenError: the file raises an error; the message names the line.
    """
    place = resolve(path)
    module = _module(place)
    try:
        return getattr(module, attribute)
    except AttributeError:
        own = _own_names(module)
        near = nearest(attribute, own)
        raise PluginNotFoundError(
            f"the plugin file {place} has no attribute {attribute!r}; it defines {', '.join(own) or 'nothing'}",
            hint=f"did you mean {near!r}?" if near else None,
        ) from None


def load_file_class(kind: Kind, path: str, attribute: str) -> type[Plugin]:
    """Return the plugin class that an attribute of a file holds; for a plain function, a class that wraps the function.

    A class without `name` gets the attribute's name. A class without `api` gets this core's interface version.

    Raises:
        PluginNotFoundError: the file or the attribute does not exist.
        PluginBrokenError: the file fails, or the kind can't use the attribute.
        PluginIncompatibleError: the `api` of the class excludes this core's interface version.
    """
    found = load_file_attribute(path, attribute)
    title = f"{attribute} of {resolve(path)}"
    if inspect.isroutine(found) and (made := _of_function(kind, found, attribute)) is not None:
        return made
    cls = check_class(found, kind, title)
    if hasattr(cls, "api"):
        check_api(cls.api, kind, title)
    else:
        cls.api = f"=={kind.api}"  # a user's file is written for the core that runs it
    named = next((base for base in cls.__mro__ if "name" in vars(base)), None)
    # A base class that got its name here must not pass this name on to its subclasses.
    if named is None or named in _named_here:
        cls.name = attribute
        _named_here.add(cls)
    return cls


def _module(place: Path) -> types.ModuleType:
    """Return the module of a file; run the file if its content is new."""
    with _locks_lock:
        lock = _locks.setdefault(place, threading.RLock())
    with lock:
        digest = content_hash(place)
        if place not in _loaded or _loaded[place][0] != digest:
            _loaded[place] = (digest, _run(place))
        return _loaded[place][1]


def _run(place: Path) -> types.ModuleType:
    # attrs, dataclasses and pickle look up the classes of the file in sys.modules, by a name that no other file has.
    tag = hashlib.sha256(os.fsencode(place)).hexdigest()[:8]
    name = f"dovetail_file_{place.stem}_{tag}"
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise PluginBrokenError(
            f"the plugin file {place} is not a Python file",
            hint="give a file whose name ends in .py",
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _modules_beside(place), no_exit():
            # Compile the source: Python takes __pycache__ for current if a rewritten file has the same second and size.
            code = spec.loader.source_to_code(spec.loader.get_data(str(place)), str(place))
            exec(code, module.__dict__)  # noqa: S102 - as an import does
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        line = _line_in(place, error)
        hint = "fix the file"
        if isinstance(error, ModuleNotFoundError):
            hint = f"install the package that provides {error.name!r}, or put the module beside the file"
        raise PluginBrokenError(
            f"the plugin file {place}{f':{line}' if line else ''} fails: {type(error).__name__}: {error}",
            hint=hint,
        ) from error
    for value in vars(module).values():
        if isinstance(value, type) and attrs.has(value) and value.__module__ == name:
            copyreg.pickle(value, partial(_reduced, str(place)))
    return module


@contextmanager
def _modules_beside(place: Path) -> Iterator[None]:
    """Put a file's folder first on the module path while the file runs, as for a script, and last afterwards.

    Files in two folders may each have a `helpers.py`: while a file runs, its imports find the one in its own folder. A later import
    inside a function finds the `helpers.py` of the file that was run last.
    """
    folder = place.parent
    for module in {each.stem for each in folder.glob("*.py")} | {
        each.parent.name for each in folder.glob("*/__init__.py")
    }:
        if _folder_of(sys.modules.get(module)) in _folders - {folder}:
            for name in [*sys.modules]:
                if name.partition(".")[0] == module:
                    del sys.modules[name]
    _folders.add(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # Python caches a folder's listing, which may lack a new module.
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def _folder_of(module: types.ModuleType | None) -> Path | None:
    """Return the folder that contains a top-level module or package; None if the module has no file."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    place = Path(file)
    return place.parent.parent if place.name == "__init__.py" else place.parent


def _reduced(path: str, value: object) -> tuple[Any, ...]:
    """Return pickle's reduction of an instance, such as a config: it names the file, which the other process may have to run first."""
    return _blank, (path, type(value).__name__), value.__getstate__()


def _blank(path: str, attribute: str) -> Any:
    cls = load_file_attribute(path, attribute)
    return cls.__new__(cls)


def _line_in(place: Path, error: BaseException) -> int | None:
    if isinstance(error, SyntaxError):
        return error.lineno
    lines = [
        f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(place)
    ]
    return lines[-1] if lines else None


def _own_names(module: types.ModuleType) -> list[str]:
    """Return the names of the public classes and functions that a file itself defines."""
    return sorted(
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    )


def _of_function(kind: Kind, function: Callable[..., Any], attribute: str) -> type[Plugin] | None:
    """Return the plugin class that wraps a function; None if plugins of the kind can't be made from functions.

    The class is made by `of_function` of the kind's interface, or else by an installed package (`dovetail.functions`).

    Raises:
        PluginNotFoundError: the package that makes such plugins is not installed.
    """
    make = getattr(import_object(kind.interface), "of_function", None) or _maker(kind)
    if make is None:
        if (package := OF_FUNCTIONS.get(kind.name)) is not None:
            raise PluginNotFoundError(
                f"{attribute} is a function; the package {package}, which turns it into {with_article(kind.name)} plugin, is not installed",
                hint=f"pip install {package}",
            )
        return None
    cls: type[Plugin] = make(function, attribute)
    cls.__doc__, cls.__module__ = function.__doc__, function.__module__
    cls.name, cls.api = attribute, f"=={kind.api}"
    return cls


def _maker(kind: Kind) -> Callable[..., type[Plugin]] | None:
    """Return a package's function that makes plugins of a kind from plain functions; None if no package has one."""
    found = default_index().extensions(FUNCTIONS_GROUP)
    return next((entry.load() for entry, _ in found if entry.name == kind.name), None)


def file_and_attribute(
    kind: str, path: object, attribute: object, name: object = None
) -> tuple[str, str]:
    """Check and return `path` and `attribute` of a config section. For a reward function, `attribute` defaults to `compute_score`.

    Raises:
        ConfigError: the section also selects an installed plugin by `name`, or lacks a path or an attribute.
    """
    if not isinstance(path, str) or not path:
        raise ConfigError(f"`path` must be the path of a Python file, not {path!r}")
    if name is not None:
        raise ConfigError(
            f"{with_article(kind)} section names both the plugin {name!r} and the file {path!r}",
            hint="keep one: `name` for an installed plugin, `path` and `attribute` for a file",
        )
    if attribute is None and kind == "reward_function":
        return path, "compute_score"
    if not isinstance(attribute, str) or not attribute:
        raise ConfigError(
            f"{with_article(kind)} section gives the file {path!r}, but does not name the class in it",
            hint="add `attribute`, the name of the class",
        )
    return path, attribute
