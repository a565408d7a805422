"""`dovetail plugins new KIND NAME --into PACKAGE`: adds a plugin to an existing package."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tomlkit
from packaging.requirements import Requirement

from dovetail.errors import PluginError
from dovetail.plugins.kinds import GROUP_PREFIX
from dovetail.plugins.manifest import FILE_NAME, normalised
from dovetail_sdk.manifest import write
from dovetail_sdk.project import Project, read_project
from dovetail_sdk.scaffold.new import (
    EXTENSIONS,
    check_words,
    is_test,
    rendered,
    requirements_of,
    target_of,
    tidy,
)


def add_plugin(kind: str, name: str, directory: Path) -> list[Path]:
    """Add a plugin to the package in `directory`: a folder with its modules, tests and an entry point.

    Also writes the package's manifest again, and adds the entry point and the template's requirements to pyproject.toml. No other file
    of the package changes.

    Args:
        kind: one of `KINDS`.
        name: the plugin's name, `[a-z][a-z0-9_]*`.
        directory: the package's source folder, with its pyproject.toml.

    Returns:
        The new files, relative to `directory`.

    Raises:
        PluginError: the kind or the package does not exist, the name is taken, or the manifest can't be derived. The package is
            unchanged after any error.
    """
    check_words(kind, name)
    project = read_project(directory)
    package = _package(project)
    _check_module_free(package, name)
    pyproject = directory / "pyproject.toml"
    target = f"{package.name}.{name}.plugin:{target_of(kind, name)}"
    changed = _with_entry(pyproject, kind, name, target)
    modules = package.relative_to(directory) / name
    texts = {modules / "__init__.py": f'"""The {kind.replace("_", " ")} {name}."""\n'}
    for file, content in rendered(kind, name, f"{package.name}.{name}").items():
        # The test goes to the package's other tests, with the plugin's name in its file name.
        test = Path("tests", f"test_{name}_{file.removeprefix('test_')}")
        texts[test if is_test(file) else modules / file] = content
    taken = [str(path) for path in texts if (directory / path).exists()]
    if taken:
        raise PluginError(
            f"{directory} already contains {', '.join(taken)}", hint="choose another name"
        )
    with ExitStack() as undo:
        for kept in (pyproject, package / FILE_NAME):
            undo.callback(_restore, kept, kept.read_bytes() if kept.exists() else None)
        for path, content in texts.items():
            _make_folder((directory / path).parent, undo)
            undo.callback((directory / path).unlink, missing_ok=True)
            (directory / path).write_text(content, encoding="utf-8")
        pyproject.write_bytes(changed)
        tidy(directory, list(texts))
        if kind not in EXTENSIONS:
            write(read_project(directory))
        undo.pop_all()
    return list(texts)


def _check_module_free(package: Path, name: str) -> None:
    """Refuse a name that a module or folder of the package has already, since a folder would hide the module."""
    for taken in (package / f"{name}.py", package / name):
        if taken.exists():
            raise PluginError(
                f"{package} already contains {taken.name}, but the new plugin's modules need the folder {name}/",
                hint="choose another name",
            )


def _make_folder(folder: Path, undo: ExitStack) -> None:
    """Make a folder and its missing parents, and register with `undo` the removal of the new folders and all that is in them by then."""
    if not folder.exists():
        _make_folder(folder.parent, undo)
        folder.mkdir()
        undo.callback(shutil.rmtree, folder, ignore_errors=True)


def _restore(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink(missing_ok=True)
    else:
        file.write_bytes(content)


def _package(project: Project) -> Path:
    """Return the folder of the package's code."""
    if project.package:
        return project.package_directory
    source = project.directory / "src"
    found = sorted(place.parent for place in source.glob("*/__init__.py"))
    if len(found) == 1:
        return found[0]
    raise PluginError(
        f"{project.directory} has no plugin yet, and src/ holds {len(found)} packages; expected one, for the plugin's code",
        hint="leave --into out to write a new package",
    )


def _with_entry(file: Path, kind: str, name: str, target: str) -> bytes:
    """Return the content of a pyproject.toml with a new entry point and the kind's requirements added; the file itself is not changed.

    Comments and layout are kept.

    Args:
        file: the pyproject.toml.
        kind: the kind of plugin, which determines the entry point's group.
        name: the plugin's name.
        target: the object that the entry point names, `module:Class`.

    Raises:
        PluginError: the group already has an entry point of this name.
    """
    group = f"{GROUP_PREFIX}{kind}"
    text = file.read_bytes().decode()
    document = tomlkit.parse(text.replace("\r\n", "\n"))
    project: Any = document["project"]
    groups = project.setdefault("entry-points", tomlkit.table(is_super_table=True))
    entries = groups.setdefault(group, tomlkit.table())
    if name in entries:
        raise PluginError(
            f"{file} already has an entry point {name!r} in the group {group}",
            hint="choose another name",
        )
    entries[name] = target
    dependencies = project.setdefault("dependencies", [])
    named = {normalised(Requirement(each).name) for each in (project["name"], *dependencies)}
    for requirement in requirements_of(kind):
        if normalised(Requirement(requirement).name) not in named:
            dependencies.append(requirement)
    changed = tomlkit.dumps(document)
    return (changed.replace("\n", "\r\n") if "\r\n" in text else changed).encode()
