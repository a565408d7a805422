"""Environments of roles: packages and plugins of another interpreter, and whether they fit this one."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dovetail.errors import (
    ConfigError,
    DovetailError,
    PluginError,
    PluginIncompatibleError,
    PluginNeedsError,
)
from dovetail.interfaces import PluginRef
from dovetail.plugins import ISOLATED, ask, default_index, lock_for, torch_build

CORE = "dovetail-core"
RUNTIME = "dovetail-runtime-ray"
TIMEOUT = 120.0
"""Seconds that an environment may take to describe itself."""
_CODE = """
import platform
answer(platform.python_version())
from dovetail_runtime_ray.isolation import facts_asked_for
answer(facts_asked_for(asked))
"""
"""Code that an interpreter runs to describe itself. It sends the Python version first, since dovetail may not support that version."""
_OF_ROLLOUTS = frozenset({"rollout", "weight_transport"})
_OF_TRAINERS = frozenset(
    {
        "engine",
        "weight_transport",
        "objective",
        "optimizer",
        "schedule",
        "policy_loss",
        "loss_aggregation",
        "rollout_correction",
    }
)
"""Kinds of plugin that the processes of training roles load."""


@dataclass(frozen=True)
class EnvironmentInfo:
    """The interpreter and packages of a Python environment, as JSON values."""

    executable: str
    python: str
    packages: Mapping[str, str | None]
    """For each distribution's name its version; None if it is not installed."""
    build: str | None
    """Build of torch, such as `cpu` or `cuda 13.0`; None without torch."""
    nccl: str | None
    """Version of the NCCL that came with torch."""
    uses: Mapping[str, str] = field(default_factory=dict)
    """The versions of the distributions that the plugins' own distributions depend on, by name."""
    plugins: Sequence[Mapping[str, Any]] = ()
    """The requested plugins, each with kind, name, distribution, version and sha256. A missing plugin has the reason in `missing`.
    `unmet` lists needs that this environment does not meet, each with its install command."""

    @property
    def pip(self) -> str:
        """The command that installs packages into the environment."""
        return f"{self.executable} -m pip install"


@dataclass(frozen=True)
class EnvironmentProblem:
    """One reason why an environment does not suit its role."""

    message: str
    hint: str
    needs: bool = False
    """Whether the problem is only a missing package."""


def interpreter_of(path: str, key: str, *, exists: bool = True) -> Path:
    """Return the interpreter of a virtual environment, or the interpreter at a path.

    Args:
        path: the path as written in the config.
        key: the config's key, for the error.
        exists: whether to check that the interpreter is on this machine; False for a path on another machine.

    Raises:
        ConfigError: there is no interpreter at the path.
    """
    place = Path(path).expanduser().absolute()  # not resolved: a venv's `python` is a link
    if place.is_dir() or not (place.exists() or place.name.startswith("python")):
        place = place / "bin" / "python"
    if not exists or (place.is_file() and os.access(place, os.X_OK)):
        return place
    root = place.parent.parent if place.name.startswith("python") else place
    raise ConfigError(
        f"{key}={path!r} is neither a virtual environment nor a Python interpreter: there is no {place} on "
        f"{platform.node()}",
        hint=f"create one with `{sys.executable} -m venv {root}`, and install the packages of the role in it",
    )


def facts_here(
    plugins: Iterable[Mapping[str, Any]] = (), packages: Iterable[str] = ()
) -> EnvironmentInfo:
    """Return a description of this process's Python environment, made without importing the plugins.

    Args:
        plugins: entries of a plugin lock (a run's record of its plugins); plugins from files are left out.
        packages: distributions whose versions to include, besides dovetail-core.
    """
    asked = [item for item in plugins if item.get("path") is None]
    found = [_plugin(item) for item in asked]
    there = [_ref(item) for item in found if "missing" not in item]
    return EnvironmentInfo(
        executable=sys.executable,
        python=platform.python_version(),
        packages={name: _version(name) for name in (CORE, *packages)},
        build=torch_build(),
        nccl=_nccl(),
        uses=lock_for(there)["packages"],
        plugins=found,
    )


def facts_of(
    interpreter: Path, plugins: Iterable[Mapping[str, Any]] = (), packages: Iterable[str] = ()
) -> EnvironmentInfo:
    """Return a description of another interpreter's environment, made in a process of that interpreter.

    Raises:
        PluginIncompatibleError: the environment has another Python version, lacks dovetail-core, or does not answer.
    """
    asked = {"plugins": list(plugins), "packages": list(packages)}
    variables = {ISOLATED: str(interpreter)}
    try:
        answers, ended = ask(
            _CODE, asked, timeout=TIMEOUT, interpreter=interpreter, variables=variables
        )
    except OSError as error:
        answers, ended = [], str(error)
    if len(answers) == 2:
        return EnvironmentInfo(**answers[1])
    ours, python = platform.python_version(), answers[0] if answers else ""
    if python and _minor(python) != _minor(ours):
        raise PluginIncompatibleError(
            f"the environment of {interpreter} has Python {python}, but the controller has {ours}",
            hint=f"create it with Python {_minor(ours)}, and install the packages of the role in it",
        )
    raise PluginIncompatibleError(
        f"the environment of {interpreter} could not be inspected: {ended}",
        hint=f"{interpreter} -m pip install {RUNTIME}=={_version(RUNTIME)}",
    )


def facts_asked_for(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description of this process's environment for `facts_of`, which started the process."""
    return asdict(facts_here(asked["plugins"], asked["packages"]))


def environment_problems(
    here: EnvironmentInfo, there: EnvironmentInfo, *, accelerators: bool = False
) -> Iterator[EnvironmentProblem]:
    """Yield the differences that keep two environments from working together.

    Args:
        here: the controller's environment, described for the same plugins and packages.
        there: the role's environment.
        accelerators: whether weights travel between accelerators of the two environments.
    """
    if _minor(there.python) != _minor(here.python):
        yield EnvironmentProblem(
            f"it has Python {there.python}, but the controller has {here.python}",
            f"create it with Python {_minor(here.python)}",
        )
    for name, version in here.packages.items():
        found = there.packages.get(name)
        if found != version:
            yield EnvironmentProblem(
                f"it has {f'{name} {found}' if found else f'no {name}'}, but the controller has {name} {version}",
                f"{there.pip} {name}=={version}",
            )
    if accelerators:
        yield from _of_accelerators(here, there)
    mine = {(item["kind"], item["name"]): item for item in here.plugins}
    for item in there.plugins:
        yield from _of_plugin(mine.get((item["kind"], item["name"]), {}), item, there)


def describe_environment(
    role: str, path: str, plugins: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the plugin lock's entry for a role's Python environment: its path and, if on this machine, the versions of Python and dependencies."""
    try:
        interpreter = interpreter_of(path, f"runtime.environments.{role}")
        there = facts_of(interpreter, plugins_of_roles([role], plugins))
    except DovetailError:
        return {"path": path}
    return {"path": path, "python": there.python, "packages": dict(there.uses)}


def unfit_environment(
    role: str, path: str, plugins: Sequence[Mapping[str, Any]]
) -> Iterator[DovetailError]:
    """Yield an error for each problem of a role's Python environment, with the fix as its hint."""
    key = f"runtime.environments.{role}"
    try:
        there = facts_of(interpreter_of(path, key), plugins)
    except DovetailError as error:
        yield error
        return
    for problem in environment_problems(facts_here(plugins), there):
        yield PluginIncompatibleError(f"{key}={path!r}: {problem.message}", hint=problem.hint)


def plugins_of_roles(
    roles: Iterable[str], plugins: Iterable[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return those entries of a plugin lock (a run's record of its plugins) whose plugins are loaded by processes of these roles."""
    kinds: frozenset[str] = frozenset()
    for role in roles:
        kinds |= _OF_ROLLOUTS if role == "rollout" else _OF_TRAINERS
    return [item for item in plugins if item["kind"] in kinds]


def check_environment(
    controller: Mapping[str, Any], plugins: Iterable[Mapping[str, Any]], *, where: str
) -> None:
    """Compare this process's environment with the controller's.

    Args:
        controller: the controller's `EnvironmentInfo`, as a mapping, for the same plugins.
        plugins: the plugins that this process loads, as entries of the run's plugin lock.
        where: the name of this process in the error.

    Raises:
        PluginNeedsError: packages are missing, and nothing else differs.
        PluginIncompatibleError: the environments differ; names every difference with both values.
    """
    here = EnvironmentInfo(**controller)
    require_environment(where, environment_problems(here, facts_here(plugins, list(here.packages))))


def require_environment(where: str, found: Iterable[EnvironmentProblem]) -> None:
    """Raise an error if an environment has problems.

    Raises:
        PluginNeedsError: packages are missing, and nothing else differs.
        PluginIncompatibleError: the environment differs from the controller's; names every difference with both values.
    """
    listed = list(found)
    if not listed:
        return
    error = PluginNeedsError if all(p.needs for p in listed) else PluginIncompatibleError
    raise error(
        f"{where} is not usable: {'; '.join(p.message for p in listed)}",
        hint="\n    ".join(dict.fromkeys(p.hint for p in listed)),
    )


def _of_plugin(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], there: EnvironmentInfo
) -> Iterator[EnvironmentProblem]:
    title = f"{theirs['kind']} {theirs['name']!r} of {theirs['distribution']}"
    if theirs.get("missing"):
        version = f"=={mine['version']}" if mine.get("version") else ""
        yield EnvironmentProblem(
            f"it lacks {title}: {theirs['missing']}",
            f"{there.pip} '{theirs['distribution']}{version}'",
        )
        return
    for key, words in (("version", "version"), ("sha256", "content with SHA-256")):
        ours, others = mine.get(key), theirs.get(key)
        if mine and ours != others:
            yield EnvironmentProblem(
                f"{title} has {words} {str(others)[:12]}, but on the controller {str(ours)[:12]}",
                "install the same distribution in both environments",
            )
    for need, install in theirs["unmet"]:
        yield EnvironmentProblem(f"{title} needs {need}", install, needs=True)


def _of_accelerators(here: EnvironmentInfo, there: EnvironmentInfo) -> Iterator[EnvironmentProblem]:
    major = [(facts.build or "none").partition(".")[0] for facts in (here, there)]
    if major[0] != major[1]:
        yield EnvironmentProblem(
            f"its torch is built for {there.build}, but the trainer's for {here.build}",
            "install builds of torch for the same major version of CUDA in both environments",
        )
    # NCCL promises no compatibility between minor versions (docs.nvidia.com/deeplearning/nccl).
    minor = [(facts.nccl or "none").rsplit(".", 1)[0] for facts in (here, there)]
    if minor[0] != minor[1]:
        yield EnvironmentProblem(
            f"its version of NCCL is {there.nccl or 'unknown'}, but the trainer's is {here.nccl or 'unknown'}",
            "install the same NCCL in both environments, or set rollout.weight_transport=disk",
        )


def _plugin(item: Mapping[str, Any]) -> dict[str, Any]:
    named: dict[str, Any] = {key: item.get(key) for key in ("kind", "name", "distribution")}
    try:
        entry = default_index().find(named["kind"], f"{named['name']}@{named['distribution']}")
        [locked] = lock_for([_ref(named)])["plugins"]
    except PluginError as error:
        return {**named, "missing": error.message}
    unmet = [need for need in entry.needs if not need.met]
    return {
        **named,
        "version": locked.get("version"),
        "sha256": locked.get("sha256"),
        "unmet": [[f"{need} ({need.found})", entry.install_command] for need in unmet],
    }


def _ref(item: Mapping[str, Any]) -> PluginRef:
    return PluginRef(**{key: item[key] for key in ("kind", "name", "distribution")})


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl() -> str | None:
    found = (_version(f"nvidia-nccl-{build}") for build in ("cu13", "cu12"))
    return next((version for version in found if version), None)


def _minor(python: str) -> str:
    return ".".join(python.split(".")[:2])
