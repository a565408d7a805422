"""The installed distributions that declare `dovetail.*` entry points, found without importing them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass

from dovetail.plugins.kinds import GROUP_PREFIX
from dovetail.plugins.manifest import normalised


@dataclass(frozen=True)
class Installed:
    """One installed distribution with plugins or extensions."""

    name: str
    version: str
    requires_python: str | None
    entry_points: tuple[importlib.metadata.EntryPoint, ...]
    """The entry points of `dovetail.*` groups."""
    metadata: importlib.metadata.Distribution


def installed_distributions() -> tuple[list[Installed], list[str]]:
    """Return all distributions with `dovetail.*` entry points, and a message for each distribution that can't be read.

    If sys.path has a distribution several times, for example through a stray egg-info, the first copy counts.
    """
    seen: dict[str, importlib.metadata.Distribution] = {}
    problems = []
    for distribution in importlib.metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt") or ""
            if f"[{GROUP_PREFIX}" in text:
                seen.setdefault(normalised(_name(distribution)), distribution)
        except Exception as error:  # noqa: BLE001 - a distribution may be damaged in any way, and must break nothing else
            problems.append(_complaint(distribution, error))
    found = []
    for name, distribution in seen.items():
        try:
            found.append(_read(_first_on_path(name, distribution)))
        except Exception as error:  # noqa: BLE001 - as above
            problems.append(_complaint(distribution, error))
    return sorted(found, key=lambda item: item.name), problems


def _first_on_path(
    name: str, seen: importlib.metadata.Distribution
) -> importlib.metadata.Distribution:
    """Return the copy of a distribution that Python finds first by its name.

    `seen` is the first copy that has `dovetail.*` entry points. If Python finds another copy first, that copy has no plugins. `seen` is
    returned if Python can't find the distribution by its name.
    """
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        # The distribution's folder does not carry its name, so that only a walk over all distributions finds it.
        return seen


def _read(distribution: importlib.metadata.Distribution) -> Installed:
    metadata = distribution.metadata
    return Installed(
        name=_name(distribution),
        version=distribution.version,
        requires_python=next(iter(metadata.get_all("Requires-Python") or ()), None),
        entry_points=tuple(_entry_points(distribution)),
        metadata=distribution,
    )


def _name(distribution: importlib.metadata.Distribution) -> str:
    metadata = distribution.metadata
    if "Name" not in metadata:
        raise ValueError("its file METADATA has no field Name; install it again")
    return metadata["Name"]


def _entry_points(
    distribution: importlib.metadata.Distribution,
) -> Iterator[importlib.metadata.EntryPoint]:
    for entry_point in distribution.entry_points:
        if entry_point.group.startswith(GROUP_PREFIX):
            yield entry_point


def _complaint(distribution: importlib.metadata.Distribution, error: Exception) -> str:
    place = distribution.locate_file("")
    return f"a distribution in {place} has metadata that can't be read: {error!r}"
