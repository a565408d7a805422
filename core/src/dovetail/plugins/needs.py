"""Needs of a plugin: packages that must be installed where it runs, judged apart from whether it fits."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass

from dovetail.errors import PluginNeedsError


@dataclass(frozen=True)
class Need:
    """One any-of list of requirements, and whether this environment meets it."""

    any_of: tuple[str, ...]
    met: bool
    found: str
    """What is here: `vllm 0.24.1`, `vllm 0.20 (too old or new)` or `nothing of it`."""

    def __str__(self) -> str:
        return " or ".join(self.any_of)


def judge(needs: Iterable[tuple[str, ...]]) -> tuple[Need, ...]:
    """Judge needs in this environment, importing nothing of them."""
    return tuple(_judge(tuple(any_of)) for any_of in needs)


@functools.lru_cache(maxsize=256)
def _judge(any_of: tuple[str, ...]) -> Need:
    from packaging.requirements import InvalidRequirement, Requirement

    here = []
    for text in any_of:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            here.append(f"{text!r} is no valid requirement: {error}")
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
    """What installs the unmet needs: the distribution's own engine extras where it has them."""
    extras = engine_extras(distribution)
    if extras:
        commands = [f"pip install '{distribution}[{extra}]'" for extra in extras]
        return " or ".join(commands)
    first = " ".join(f"'{need.any_of[0]}'" for need in needs if not need.met)
    return f"pip install {first}"


def engine_extras(distribution: str) -> list[str]:
    """The extras of an installed distribution called `engine` or `engine-…`: they bring an engine."""
    try:
        metadata = importlib.metadata.metadata(distribution)
    except importlib.metadata.PackageNotFoundError:
        return []
    extras = metadata.get_all("Provides-Extra") or []
    return [extra for extra in extras if extra == "engine" or extra.startswith("engine-")]


def require(plugin: str, distribution: str, needs: Iterable[tuple[str, ...]]) -> None:
    """Refuse to go on where a need is unmet.

    Raises:
        PluginNeedsError: names every unmet need and the command that installs it.
    """
    unmet = [need for need in judge(needs) if not need.met]
    if unmet:
        wanted = " and ".join(f"{need} ({need.found})" for need in unmet)
        raise PluginNeedsError(
            f"{plugin} of {distribution} needs {wanted}",
            hint=install_command(distribution, unmet),
        )
