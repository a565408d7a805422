"""`dovetail plugins new KIND NAME`: a package with a small working plugin, its config, tests and README."""

from __future__ import annotations

import importlib.util
import keyword
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from dovetail.errors import PluginError, nearest
from dovetail.plugins.kinds import EXTENSION_GROUPS, GROUP_PREFIX, KINDS as PLUGIN_KINDS
from dovetail_sdk.manifest import write
from dovetail_sdk.project import read_project

EXTENSIONS = tuple(group.removeprefix(GROUP_PREFIX) for group in EXTENSION_GROUPS)
"""Kinds without an interface and a manifest: observers of a run, further commands, examinations of the doctor."""
KINDS = (*PLUGIN_KINDS, *EXTENSIONS)
"""Kinds that have a template: all."""
LICENCES = ("Apache-2.0", "MIT", "BSD-3-Clause", "LicenseRef-Proprietary")
"""Licences to choose from, as SPDX names them; the first is the default."""
_TEMPLATES = "templates"
_COMMON = "package"
"""The folder of templates that every kind shares; a kind's own file of the same name takes the place of one."""


def new_plugin(kind: str, name: str, parent: Path, *, licence: str = LICENCES[0]) -> Path:
    """Write the package `dovetail-<name>` below `parent` and return its directory.

    What it writes builds, installs, and passes its own tests, lint and type check as it stands.

    Args:
        kind: one of `KINDS`.
        name: the plugin's name, `[a-z][a-z0-9_]*`.
        parent: where the package's directory goes; made where it is not there.
        licence: one of `LICENCES`.

    Raises:
        PluginError: there is no such kind or licence, the name is no plain word, or the directory exists or can't be made.
    """
    check_words(kind, name)
    if licence not in LICENCES:
        raise PluginError(
            f"{licence!r} is no licence to choose from; there are {', '.join(LICENCES)}",
            hint="choose one of them, and change pyproject.toml afterwards",
        )
    directory = parent / f"dovetail-{name.replace('_', '-')}"
    if directory.exists():
        raise PluginError(
            f"{directory} exists already", hint="choose another name or --directory, or remove it"
        )
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise PluginError(
            f"{directory} can't be made: {error.strerror}", hint="choose another --directory"
        ) from error
    package = f"dovetail_{name}"
    words = {"distribution": directory.name, "licence": licence, "extensions": EXTENSIONS}
    for file, text in rendered((kind, _COMMON), kind, name, package, **words).items():
        target = directory / file.replace("PACKAGE", package)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    (directory / "src" / package / "py.typed").touch()
    tidy(directory, [Path()])
    if kind not in EXTENSIONS:
        write(read_project(directory))
    return directory


def target_of(kind: str, name: str) -> str:
    """What the entry point of a plugin names in its module."""
    class_name = "".join(part.capitalize() for part in name.split("_"))
    return {"cli": name, "doctor": "examine"}.get(kind, class_name)


def rendered(
    folders: Sequence[str], kind: str, name: str, package: str, **words: object
) -> dict[str, str]:
    """The texts of a plugin's files by their paths, in which PACKAGE stands for the package's folder.

    Args:
        folders: of templates; a file in an earlier one takes the place of one in a later one.
        kind: of plugin.
        name: of the plugin.
        package: in which its modules lie, dotted.
        **words: what else the templates name.
    """
    environment = Environment(
        loader=PackageLoader("dovetail_sdk.scaffold", _TEMPLATES),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,  # noqa: S701 - writes Python and TOML, no HTML
    )
    class_name = "".join(part.capitalize() for part in name.split("_"))
    words |= {"kind": kind, "name": name, "class_name": class_name, "package": package}
    words["target"] = target_of(kind, name)
    texts: dict[str, str] = {}
    for folder in folders:
        for template in environment.list_templates():
            if template.startswith(f"{folder}/"):
                file = template.partition("/")[2].removesuffix(".jinja")
                if file not in texts:
                    texts[file] = environment.get_template(template).render(words)
    return texts


def tidy(directory: Path, places: Sequence[Path]) -> None:
    """Lay files and folders of a package out as `ruff format` would: where a line breaks hangs on the length of the names."""
    if importlib.util.find_spec("ruff") is None:
        return
    for command in (("check", "--fix-only", "--select", "I"), ("format",)):
        subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-m", "ruff", *command, "--quiet", "--no-cache", *map(str, places)],
            cwd=directory,
            check=False,
        )


def check_words(kind: str, name: str) -> None:
    """Refuse what can't be a kind or a name.

    Raises:
        PluginError: names what there is, or what a name looks like.
    """
    if kind not in KINDS:
        near = nearest(kind, KINDS)
        raise PluginError(
            f"there is no kind of plugin {kind!r}; there are {', '.join(KINDS)}",
            hint=f"did you mean {near}?" if near else None,
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise PluginError(
            f"{name!r} can't be a plugin's name",
            hint="take a lower-case word of letters, digits and underscores, such as my_reward",
        )
