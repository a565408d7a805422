"""`dovetail plugins new KIND NAME`: a package with a small working plugin, its config, tests and README."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from dovetail.errors import PluginError, nearest
from dovetail_sdk.manifest import write
from dovetail_sdk.project import read_project

_TEMPLATES = "templates"
KINDS = ("advantage", "policy_loss", "reward_function")
"""Kinds that have a template."""


def new_plugin(kind: str, name: str, parent: Path) -> Path:
    """Write the package `dovetail-<name>` below `parent` and return its directory.

    What it writes builds, installs, and passes its own tests as it stands.

    Args:
        kind: one of `KINDS`.
        name: the plugin's name, `[a-z][a-z0-9_]*`.
        parent: an existing directory.

    Raises:
        PluginError: the kind has no template, the name is no plain word, or the directory exists.
    """
    if kind not in KINDS:
        near = nearest(kind, KINDS)
        raise PluginError(
            f"there is no template for plugins of kind {kind!r}; there are {', '.join(KINDS)}",
            hint=f"did you mean {near}?" if near else None,
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise PluginError(
            f"{name!r} can't be a plugin's name",
            hint="take a lower-case word of letters, digits and underscores, such as my_reward",
        )
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
    words = {
        "kind": kind,
        "name": name,
        "class_name": "".join(part.capitalize() for part in name.split("_")),
        "package": package,
        "distribution": directory.name,
    }
    for template in environment.list_templates():
        folder, _, file = template.partition("/")
        if folder not in ("package", kind):
            continue
        target = directory / file.removesuffix(".jinja").replace("PACKAGE", package)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(environment.get_template(template).render(words))
    (directory / "src" / package / "py.typed").touch()
    write(read_project(directory))
    return directory
