"""`dovetail plugins new KIND NAME --into PACKAGE`: one more plugin in a package that there is."""

from __future__ import annotations

import re
import shutil
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dovetail.errors import PluginError
from dovetail.plugins.kinds import GROUP_PREFIX
from dovetail.plugins.manifest import FILE_NAME
from dovetail_sdk.manifest import write
from dovetail_sdk.project import Project, read_project
from dovetail_sdk.scaffold.new import EXTENSIONS, check_words, rendered, target_of, tidy

_HEADER = re.compile(r"^\s*\[.*\]\s*(#.*)?$")
_ENTRY_POINTS = re.compile(r"^\s*\[\s*project\s*\.\s*entry-points\b.*\]\s*(#.*)?$")


def add_plugin(kind: str, name: str, directory: Path) -> list[Path]:
    """Write a plugin into the package in `directory`: modules in a folder of their own, tests, an entry point.

    The manifest is derived anew. What the package holds already is left as it is, beside two lines in pyproject.toml.

    Args:
        kind: one of `KINDS`.
        name: the plugin's name, `[a-z][a-z0-9_]*`.
        directory: the package's source folder, with its pyproject.toml.

    Returns:
        The new files, relative to `directory`.

    Raises:
        PluginError: there is no such kind, no package, a plugin or module of that name, or a file where one of the new ones
            goes; pyproject.toml is written in a way that can't be added to; the manifest can't be derived. The package is
            as it was then, as after an OSError.
    """
    check_words(kind, name)
    project = read_project(directory)
    package = _package(project)
    _check_module_free(package, name)
    entry = f'{name} = "{package.name}.{name}.plugin:{target_of(kind, name)}"'
    file = directory / "pyproject.toml"
    text = _with_entry(file, f"{GROUP_PREFIX}{kind}", name, entry)
    modules = package.relative_to(directory) / name
    texts = {modules / "__init__.py": f'"""The {kind.replace("_", " ")} {name}."""\n'}
    for template, content in rendered((kind,), kind, name, f"{package.name}.{name}").items():
        texts[_place(Path(template), modules, name)] = content
    taken = [str(path) for path in texts if (directory / path).exists()]
    if taken:
        raise PluginError(
            f"{directory} holds {', '.join(taken)} already", hint="choose another name"
        )
    with ExitStack() as undo:
        for kept in (file, package / FILE_NAME):
            undo.callback(_put_back, kept, kept.read_bytes() if kept.exists() else None)
        for path, content in texts.items():
            _make_folder((directory / path).parent, undo)
            undo.callback((directory / path).unlink, missing_ok=True)
            (directory / path).write_text(content, encoding="utf-8")
        file.write_bytes(text.encode())
        tidy(directory, list(texts))
        if kind not in EXTENSIONS:
            write(read_project(directory))
        undo.pop_all()
    return list(texts)


def _check_module_free(package: Path, name: str) -> None:
    """Refuse a name that the package's code has already: a folder would hide a module of the same name."""
    for taken in (package / f"{name}.py", package / name):
        if taken.exists():
            raise PluginError(
                f"{package} holds {taken.name} already, and the new plugin's modules go to {name}/",
                hint="choose another name",
            )


def _make_folder(folder: Path, undo: ExitStack) -> None:
    """Make a folder with those above it; `undo` removes what was made, with the byte code that an import left there."""
    if not folder.exists():
        _make_folder(folder.parent, undo)
        folder.mkdir()
        undo.callback(shutil.rmtree, folder, ignore_errors=True)


def _put_back(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink(missing_ok=True)
    else:
        file.write_bytes(content)


def _package(project: Project) -> Path:
    """The folder of the package's code."""
    if project.package:
        return project.package_directory
    source = project.directory / "src"
    found = sorted(place.parent for place in source.glob("*/__init__.py"))
    if len(found) == 1:
        return found[0]
    raise PluginError(
        f"{project.directory} has no plugin yet, and not one package in src/, so that there is no telling where its code lies",
        hint="leave --into out, which writes a package of its own",
    )


def _place(path: Path, modules: Path, name: str) -> Path:
    """Where a file of the templates goes: modules into their folder, a test beside the others under the plugin's name."""
    if path.parts[0] == "src":
        return modules.joinpath(*path.parts[2:])
    return path.with_name(f"test_{name}_{path.name.removeprefix('test_')}")


def _with_entry(file: Path, group: str, name: str, entry: str) -> str:
    """The text of a pyproject.toml with one more entry point, and nothing else changed."""
    text = file.read_bytes().decode()
    before = tomllib.loads(text)
    entries = before["project"].get("entry-points", {})
    if name in entries.get(group, {}):
        raise PluginError(
            f"{file} has an entry point {name!r} of the group {group} already",
            hint="choose another name",
        )
    end = "\r\n" if "\r\n" in text else "\n"
    lines = (text if text.endswith("\n") else text + end).splitlines(keepends=True)
    header = f'[project.entry-points."{group}"]'
    same = [i for i, line in enumerate(lines) if line.split("#")[0].strip() == header]
    tables = same or [i for i, line in enumerate(lines) if _ENTRY_POINTS.match(line)]
    last = _end(lines, tables[-1]) if tables else len(lines)
    lines[last:last] = [line + end for line in ([entry] if same else ["", header, entry])]
    changed = "".join(lines)
    if _read(changed) != _wanted(before, group, entry):
        raise PluginError(
            f"{file} is written in a way that a line can't be added to",
            hint=f'write [project.entry-points."{group}"] as a table of its own',
        )
    return changed


def _end(lines: list[str], header: int) -> int:
    """The line after the last entry of a table."""
    following = range(header + 1, len(lines))
    end = next((i for i in following if _HEADER.match(lines[i])), len(lines))
    while not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#"):
        end -= 1
    return end


def _read(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _wanted(before: dict[str, Any], group: str, entry: str) -> dict[str, Any]:
    """What pyproject.toml should say with the new entry point."""
    project = before["project"]
    groups = project.get("entry-points", {})
    added = {**groups, group: {**groups.get(group, {}), **tomllib.loads(entry)}}
    return {**before, "project": {**project, "entry-points": added}}
