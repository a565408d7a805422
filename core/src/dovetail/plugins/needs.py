"""Needs of a plugin: packages that must be installed in the plugin's environment."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dovetail.errors import PluginNeedsError

ISOLATED = "DOVETAIL_ENVIRONMENT"
"""Environment variable of processes outside the controller's Python environment: the path of their environment, as in the config."""


@dataclass(frozen=True)
class Need:
    """A list of alternative requirements, and whether this environment meets one of them."""

    any_of: tuple[str, ...]
    met: bool
    found: str
    """The installed packages: `vllm 0.24.1`, `vllm 0.20, which is outside >=0.24`, or `not installed`."""

    def __str__(self) -> str:
        return " or ".join(self.any_of)


def judge(needs: Iterable[tuple[str, ...]]) -> tuple[Need, ...]:
    """Check whether this environment meets needs, without importing packages. Each need is a list of alternative requirements."""
    return tuple(_judge(tuple(any_of)) for any_of in needs)


@functools.lru_cache(maxsize=256)
def _judge(any_of: tuple[str, ...]) -> Need:
    from packaging.requirements import InvalidRequirement, Requirement

    here = []
    for text in any_of:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            here.append(f"{text!r} is not a valid requirement: {error}")
            continue
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if requirement.specifier.contains(version, prereleases=True):
            return Need(any_of, met=True, found=f"{requirement.name} {version}")
        here.append(f"{requirement.name} {version}, which is outside {requirement.specifier}")
    return Need(any_of, met=False, found="; ".join(here) or "not installed")


def install_command(distribution: str, needs: Iterable[Need]) -> str:
    """Return the command that installs the missing needs, through the distribution's engine extras if it has any.

    In the Python environment of a single role (`DOVETAIL_ENVIRONMENT` is set), the command names the environment's interpreter. If the
    distribution's metadata has a project URL named `Package index`, the command also uses that package index.
    """
    unmet = [need for need in needs if not need.met]
    pip = f"{sys.executable} -m pip" if ISOLATED in os.environ else "pip"
    install = f"{pip} install --pre" if any(map(_before_release, unmet)) else f"{pip} install"
    url = _package_index(distribution)
    index = f" --extra-index-url {url}" if url else ""
    extras = engine_extras(distribution)
    if extras:
        return " or ".join(f"{install} '{distribution}[{extra}]'{index}" for extra in extras)
    first = " ".join(f"'{need.any_of[0]}'" for need in unmet)
    return f"{install} {first}{index}"


def _before_release(need: Need) -> bool:
    """Return whether a need allows pre-releases, so that pip must be called with `--pre`."""
    from packaging.requirements import InvalidRequirement, Requirement

    with suppress(InvalidRequirement):
        return any(bool(Requirement(text).specifier.prereleases) for text in need.any_of)
    return False


def _package_index(distribution: str) -> str | None:
    """Return the package index that a distribution names in its Project-URL "Package index"; None if it names none."""
    try:
        metadata = importlib.metadata.metadata(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    urls = (text.partition(",") for text in metadata.get_all("Project-URL") or [])
    return next((url.strip() for label, _, url in urls if label == "Package index"), None)


def engine_extras(distribution: str) -> list[str]:
    """Return the extras of a distribution that install an engine, named `engine` or `engine-…`."""
    try:
        metadata = importlib.metadata.metadata(distribution)
    except importlib.metadata.PackageNotFoundError:
        return []
    extras = metadata.get_all("Provides-Extra") or []
    return [extra for extra in extras if extra == "engine" or extra.startswith("engine-")]


def require(plugin: str, distribution: str, needs: Iterable[tuple[str, ...]]) -> None:
    """Raise an error if this environment does not meet a need.

    Raises:
        PluginNeedsError: a need is not met; the error names every unmet need and the install command.
    """
    unmet = [need for need in judge(needs) if not need.met]
    if unmet:
        wanted = " and ".join(f"{need} ({need.found})" for need in unmet)
        raise PluginNeedsError(
            f"{plugin} of {distribution} needs {wanted}",
            hint=install_command(distribution, unmet),
        )


def packages_of(distributions: Iterable[str]) -> dict[str, str]:
    """Return the installed versions of these distributions' direct dependencies, engine extras included.

    Packages that are not installed are left out.
    """
    from packaging.requirements import Requirement

    names: set[str] = set()
    for distribution in sorted(set(distributions)):
        try:
            texts = importlib.metadata.requires(distribution) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        extras = ["", *engine_extras(distribution)]
        for requirement in map(Requirement, texts):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                names.add(requirement.name.lower())
    versions: dict[str, str] = {}
    for name in sorted(names):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def torch_build() -> str | None:
    """Return the build of the installed torch: `cpu`, `cuda 13.0` or `rocm 7.1`; None if torch is absent."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "version.py"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return None
    for key, name in (("cuda", "cuda"), ("hip", "rocm")):
        match = re.search(rf"^{key}\s*(?::[^=]+)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if match:
            return f"{name} {match.group(1)}"
    return "cpu"
