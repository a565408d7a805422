"""`dovetail plugins new KIND NAME`: a package with a small working plugin, its config, tests and README."""

from __future__ import annotations

import importlib.util
import keyword
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined

from dovetail.errors import PluginError, nearest
from dovetail.plugins.index import default_index
from dovetail.plugins.kinds import EXTENSION_GROUPS, GROUP_PREFIX, KINDS_GROUP
from dovetail.plugins.manifest import package_directories
from dovetail_sdk.check.suites import class_name, suite_module, suite_name
from dovetail_sdk.manifest import write
from dovetail_sdk.project import read_project

EXTENSIONS = tuple(group.removeprefix(GROUP_PREFIX) for group in EXTENSION_GROUPS)
"""Kinds without an interface and a manifest: observers of a run, commands, checks of `doctor`, preflight rules."""
LICENCES = ("Apache-2.0", "MIT", "BSD-3-Clause", "LicenseRef-Proprietary")
"""Licences to choose from, as SPDX names them; the first is the default."""

_PLUGIN_KINDS = default_index().kinds
_BRINGERS = {
    entry_point.name: (entry_point.module.partition(".")[0], distribution)
    for entry_point, distribution in default_index().extensions(KINDS_GROUP)
}
"""Kind → (import package, distribution) that adds it, for kinds that are not core's."""
_IMPORTED = {
    "dovetail-stages>=0.1": ("engine", "objective", "stage_set"),
    "dovetail-rollouts>=0.1": ("reward_manager", "rollout", "source", "weight_transport"),
    "dovetail-torch-engines>=0.1": ("engine",),
    "torch>=2.11": (
        *("engine", "objective", "optimizer", "policy_loss", "rollout"),
        *("rollout_correction", "weight_transport"),
    ),
}
"""Requirements of the templates' imports, each with the kinds whose templates need it."""
_TESTED_WITH_TORCH = (
    *("agent_loop", "engine", "loss_aggregation", "objective", "optimizer", "policy_loss"),
    *("reward_manager", "rollout", "rollout_correction", "source", "weight_transport"),
)
"""Kinds whose suites need the SDK's extra `torch`."""

# The folder of a kind holds the templates that differ between kinds; they extend the templates in `base`, which also has the
# test for kinds without a test of their own. `package` holds the other files of a package, and `repository` the other files of
# a repository. A package that adds a kind has the kind's folder in its own folder `scaffold`.
_TEMPLATES = Environment(
    loader=ChoiceLoader(
        [
            PackageLoader("dovetail_sdk.scaffold"),
            *(
                FileSystemLoader(place / "scaffold")
                for package in dict.fromkeys(package for package, _ in _BRINGERS.values())
                for place in package_directories(package)
            ),
        ]
    ),
    undefined=StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
    autoescape=False,  # noqa: S701 - writes Python and TOML, no HTML
)
_TEST = "test_conformance.py"
KINDS = tuple(
    kind
    for kind in (*_PLUGIN_KINDS, *EXTENSIONS)
    if any(template.startswith(f"{kind}/") for template in _TEMPLATES.list_templates())
)
"""Kinds that have a template: all kinds of core, some kinds of other packages, and most of `EXTENSIONS`."""


def new_plugin(
    kind: str, name: str, parent: Path, *, licence: str = LICENCES[0], repository: bool = False
) -> Path:
    """Write the package `dovetail-<name>` below `parent` and return its directory.

    The package builds, installs, and passes its own tests, lint and type check without changes.

    Args:
        kind: one of `KINDS`.
        name: the plugin's name, `[a-z][a-z0-9_]*`.
        parent: the parent of the package's directory; created if missing.
        licence: one of `LICENCES`.
        repository: add the files of a repository of its own: workflows for tests and releases, hooks, a changelog.

    Raises:
        PluginError: the kind, licence or name is invalid, or the directory exists or can't be made.
    """
    check_words(kind, name)
    if licence not in LICENCES:
        raise PluginError(
            f"unknown licence {licence!r}; expected one of {', '.join(LICENCES)}",
            hint="choose one of them, and change pyproject.toml afterwards",
        )
    directory = parent / f"dovetail-{name.replace('_', '-')}"
    if directory.exists():
        raise PluginError(
            f"{directory} already exists", hint="choose another name or --directory, or remove it"
        )
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise PluginError(
            f"{directory} can't be created: {error.strerror}", hint="choose another --directory"
        ) from error
    package = f"dovetail_{name}"
    words = {**_words(kind, name, package), "distribution": directory.name, "licence": licence}
    texts = {
        file.replace("PACKAGE", package): _TEMPLATES.get_template(template).render(words)
        for folder in ("package", *(("repository",) if repository else ()))
        for file, template in _files(folder)
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
    """Return the name of the class or function, in the plugin's module, to which the entry point refers."""
    return {"cli": name, "doctor": "examine", "preflight": name}.get(kind, class_name(name))


def rendered(kind: str, name: str, package: str) -> dict[str, str]:
    """Return the texts of a plugin's modules and tests by their file names.

    Args:
        kind: the kind of plugin.
        name: the name of the plugin.
        package: the dotted name of the package that holds the modules.
    """
    files = dict(_files(kind))
    words = {**_words(kind, name, package), "has_conformance": "conformance.py" in files}
    if not any(map(is_test, files)):
        files[_TEST] = f"base/{_TEST}.jinja"
    return {file: _TEMPLATES.get_template(files[file]).render(words) for file in files}


def is_test(file: str) -> bool:
    """Return whether a file of `rendered` is a test rather than a module."""
    return file.startswith("test_")


def _files(folder: str) -> Iterator[tuple[str, str]]:
    """Yield, for each template of a folder, the name of the file that is made from it and the name of the template."""
    for template in _TEMPLATES.list_templates():
        if template.startswith(f"{folder}/"):
            yield template.removeprefix(f"{folder}/").removesuffix(".jinja"), template


def _words(kind: str, name: str, package: str) -> dict[str, object]:
    """Return the values of the variables that a kind's templates use, by variable name."""
    words: dict[str, object] = {
        "kind": kind,
        "name": name,
        "package": package,
        "class_name": class_name(name),
        "target": target_of(kind, name),
        "extensions": EXTENSIONS,
        "brought": kind in _BRINGERS,
        "requirements": requirements_of(kind),
        "sdk_extra": "[torch]" if kind in _TESTED_WITH_TORCH else "",
    }
    if kind in _PLUGIN_KINDS:
        major = int(_PLUGIN_KINDS[kind].api.partition(".")[0])
        words["api"] = f">={major}.0,<{major + 1}"
        words["section"] = _PLUGIN_KINDS[kind].section.partition(":")[2]
        words["section_module"] = "dovetail.sections"
        if kind in _BRINGERS:
            words["section_module"] = _BRINGERS[kind][0]
        words["suite"], words["suite_module"] = suite_name(kind), suite_module(kind)
    return words


def requirements_of(kind: str) -> list[str]:
    """Return a kind's requirements besides core: the package that defines the kind, and the packages that its template imports."""
    required = [package for package, kinds in _IMPORTED.items() if kind in kinds]
    if kind in _BRINGERS:
        _, distribution = _BRINGERS[kind]
        version = ".".join(distribution.version.split(".")[:2])
        required.insert(0, f"{distribution.name}>={version}")
    return required


def tidy(directory: Path, places: Sequence[Path]) -> None:
    """Apply ruff's formatter and import sorting to files and folders of a package; do nothing if ruff is not installed.

    Formatting is needed because the length of the plugin's name changes the line breaks of the templates.
    """
    if importlib.util.find_spec("ruff") is None:
        return
    for command in (("check", "--fix-only", "--select", "I"), ("format",)):
        subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-m", "ruff", *command, "--quiet", "--no-cache", *map(str, places)],
            cwd=directory,
            check=False,
        )


def check_words(kind: str, name: str) -> None:
    """Refuse an invalid kind or name.

    Raises:
        PluginError: the kind or name is invalid; the message lists the existing kinds or describes a valid name.
    """
    if kind not in KINDS:
        near = nearest(kind, KINDS)
        raise PluginError(
            f"unknown kind of plugin {kind!r}; expected one of {', '.join(KINDS)}",
            hint=f"did you mean {near}?" if near else None,
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise PluginError(
            f"{name!r} can't be a plugin's name",
            hint="use lower-case letters, digits and underscores, with a letter at the start, such as my_reward",
        )
