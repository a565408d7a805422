"""`dovetail plugins new KIND NAME`: a package with a small working plugin, its config, tests and README."""

from __future__ import annotations

import importlib.util
import keyword
import re
import subprocess
import sys
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from dovetail.errors import PluginError, nearest
from dovetail.plugins.kinds import EXTENSION_GROUPS, GROUP_PREFIX
from dovetail.plugins.kinds import KINDS as PLUGIN_KINDS
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
        PluginError: there is no such kind or licence, the name is no plain word, or the directory exists.
    """
    _check(kind, name, licence)
    directory = parent / f"dovetail-{name.replace('_', '-')}"
    if directory.exists():
        raise PluginError(
            f"{directory} exists already", hint="choose another name or --directory, or remove it"
        )
    package = f"dovetail_{name}"
    environment = Environment(
        loader=PackageLoader("dovetail_sdk.scaffold", _TEMPLATES),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,  # noqa: S701 - writes Python and TOML, no HTML
    )
    class_name = "".join(part.capitalize() for part in name.split("_"))
    words = {
        "kind": kind,
        "name": name,
        "class_name": class_name,
        "target": {"cli": name, "doctor": "examine"}.get(kind, class_name),
        "package": package,
        "distribution": directory.name,
        "licence": licence,
        "extensions": EXTENSIONS,
    }
    for template in _templates(environment, kind):
        _, _, file = template.partition("/")
        target = directory / file.removesuffix(".jinja").replace("PACKAGE", package)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(environment.get_template(template).render(words), encoding="utf-8")
    (directory / "src" / package / "py.typed").touch()
    _tidy(directory)
    if kind not in EXTENSIONS:
        write(read_project(directory))
    return directory


def _tidy(directory: Path) -> None:
    """Lay the files out as `ruff format` would: where a line breaks hangs on the length of the names."""
    if importlib.util.find_spec("ruff") is None:
        return
    for command in (("check", "--fix-only", "--select", "I"), ("format",)):
        subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-m", "ruff", *command, "--quiet", "--no-cache", "."],
            cwd=directory,
            check=False,
        )


def _templates(environment: Environment, kind: str) -> list[str]:
    found = environment.list_templates()
    own = [template for template in found if template.startswith(f"{kind}/")]
    taken = {template.partition("/")[2] for template in own}
    common = [template for template in found if template.startswith(f"{_COMMON}/")]
    return [*own, *(template for template in common if template.partition("/")[2] not in taken)]


def _check(kind: str, name: str, licence: str) -> None:
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
    if licence not in LICENCES:
        raise PluginError(
            f"{licence!r} is no licence to choose from; there are {', '.join(LICENCES)}",
            hint="choose one of them, and change pyproject.toml afterwards",
        )
