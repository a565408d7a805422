"""`dovetail plugins new KIND NAME`: a package with a small working plugin, its config, tests and README."""

from __future__ import annotations

import functools
import importlib.util
import keyword
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined

from dovetail.errors import PluginError, nearest
from dovetail.plugins.catalogue import FIRST_PARTY
from dovetail.plugins.index import default_index
from dovetail.plugins.kinds import EXTENSION_GROUPS, GROUP_PREFIX, KINDS as PLUGIN_KINDS
from dovetail_sdk.check.suites import class_name, suite_module, suite_name
from dovetail_sdk.manifest import write
from dovetail_sdk.project import read_project

EXTENSIONS = tuple(group.removeprefix(GROUP_PREFIX) for group in EXTENSION_GROUPS)
"""Kinds without an interface and a manifest: observers of a run, further commands, examinations of the doctor, preflight rules."""
LICENCES = ("Apache-2.0", "MIT", "BSD-3-Clause", "LicenseRef-Proprietary")
"""Licences to choose from, as SPDX names them; the first is the default."""

_TEST = "test_conformance.py"
_OWN = PackageLoader("dovetail_sdk.scaffold")
KINDS = tuple(
    kind
    for kind in (*PLUGIN_KINDS, *EXTENSIONS)
    if any(template.startswith(f"{kind}/") for template in _OWN.list_templates())
)
"""Kinds of core that have a template: all that are plugins, and most of `EXTENSIONS`."""


@functools.cache
def _templates() -> Environment:
    """The templates of the kit, and those of packages that bring kinds, which are in the package's folder `scaffold`.

    A folder a kind holds what differs between kinds. Its files extend those in `base`, which also has the test of a kind without one of
    its own; `package` holds what a package has besides its plugin.
    """
    brought = {_package_of(kind) for kind in default_index().kinds if kind not in PLUGIN_KINDS}
    folders = [Path(str(resources.files(package))) / "scaffold" for package in sorted(brought)]
    return Environment(
        loader=ChoiceLoader([_OWN, *map(FileSystemLoader, filter(Path.is_dir, folders))]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,  # noqa: S701 - writes Python and TOML, no HTML
    )


def kinds() -> tuple[str, ...]:
    """Return the kinds that have a template, those of installed packages too."""
    brought = {template.partition("/")[0] for template in _templates().list_templates()}
    return (
        *KINDS,
        *(kind for kind in default_index().kinds if kind in brought and kind not in KINDS),
    )


def _package_of(kind: str) -> str:
    """The package that brings a kind."""
    return default_index().kind(kind).interface.partition(".")[0]


def new_plugin(kind: str, name: str, parent: Path, *, licence: str = LICENCES[0]) -> Path:
    """Write the package `dovetail-<name>` below `parent` and return its directory.

    What it writes builds, installs, and passes its own tests, lint and type check as it stands.

    Args:
        kind: one of `kinds()`.
        name: the plugin's name, `[a-z][a-z0-9_]*`.
        parent: where the package's directory goes; made where it does not exist.
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
    words = {**_words(kind, name, package), "distribution": directory.name, "licence": licence}
    texts = {
        file.replace("PACKAGE", package): _templates().get_template(template).render(words)
        for file, template in _files("package")
    }
    for file, text in rendered(kind, name, package).items():
        texts[f"tests/{file}" if is_test(file) else f"src/{package}/{file}"] = text
    for place, text in texts.items():
        target = directory / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    (directory / "src" / package / "py.typed").touch()
    tidy(directory, [Path()])
    if kind not in EXTENSIONS:
        write(read_project(directory))
    return directory


def target_of(kind: str, name: str) -> str:
    """Return what a plugin's entry point names in its module."""
    return {"cli": name, "doctor": "examine", "preflight": name}.get(kind, class_name(name))


def rendered(kind: str, name: str, package: str) -> dict[str, str]:
    """Return the texts of a plugin's modules and tests by their file names.

    Args:
        kind: of plugin.
        name: of the plugin.
        package: in which its modules lie, dotted.
    """
    files = dict(_files(kind))
    words = {**_words(kind, name, package), "has_conformance": "conformance.py" in files}
    if not any(map(is_test, files)):
        files[_TEST] = f"base/{_TEST}.jinja"
    return {file: _templates().get_template(files[file]).render(words) for file in files}


def is_test(file: str) -> bool:
    """Return whether a file of `rendered` is a test rather than a module."""
    return file.startswith("test_")


def _files(folder: str) -> Iterator[tuple[str, str]]:
    """The file that each template of a folder makes, and the template."""
    for template in _templates().list_templates():
        if template.startswith(f"{folder}/"):
            yield template.removeprefix(f"{folder}/").removesuffix(".jinja"), template


def _words(kind: str, name: str, package: str) -> dict[str, object]:
    """What templates name."""
    words: dict[str, object] = {
        "kind": kind,
        "name": name,
        "package": package,
        "class_name": class_name(name),
        "target": target_of(kind, name),
        "extensions": EXTENSIONS,
    }
    if kind not in EXTENSIONS:
        known = default_index().kind(kind)
        major = int(known.api.partition(".")[0])
        words["api"] = f">={major}.0,<{major + 1}"
        words["section"] = known.section.partition(":")[2]
        words["sections"] = "dovetail.sections" if kind in PLUGIN_KINDS else _package_of(kind)
        words["brought_by"] = "" if kind in PLUGIN_KINDS else _package_of(kind).replace("_", "-")
        words["suite"], words["suites"] = suite_name(kind), suite_module(kind)
    return words


def tidy(directory: Path, places: Sequence[Path]) -> None:
    """Lay files and folders of a package out as `ruff format` would: where a line breaks depends on the length of the names."""
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
    if kind not in (known := kinds()):
        near, home = nearest(kind, known), next(iter(FIRST_PARTY.get(kind, {}).values()), None)
        raise PluginError(
            f"there is no kind of plugin {kind!r}; there are {', '.join(known)}",
            hint=f"pip install {home}" if home else f"did you mean {near}?" if near else None,
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise PluginError(
            f"{name!r} can't be a plugin's name",
            hint="take a lower-case word of letters, digits and underscores, such as my_reward",
        )
