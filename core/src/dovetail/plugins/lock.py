"""The plugin lock, `plugins.lock.json`: the plugins that a run used, for comparison with the current ones."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from dovetail.errors import PluginError
from dovetail.interfaces.runtime import PluginRef
from dovetail.plugins.load import config_class
from dovetail.plugins.needs import packages_of
from dovetail.plugins.pinned import pinned
from dovetail.sections.placement import RuntimeSection

FILE_NAME = "plugins.lock.json"
SCHEMA = 1


def lock_for(
    refs: Iterable[PluginRef], environments: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return a plugin lock, which records these plugins as installed now: versions, interface ranges, and hashes of code that can change.

    The version pins a released wheel; the SHA-256 of the content pins an editable install or a file. `packages` holds the
    installed versions of the plugins' dependencies.

    Args:
        refs: the plugins.
        environments: the path of the environment of each role's processes, as in `runtime.environments`. An environment
            that is not on this machine is described by its path alone.

    Raises:
        PluginError: a plugin no longer exists.
    """
    hashes: dict[str, str] = {}
    return _assembled([pinned(ref, hashes) for ref in refs], environments or {})


def now_for(old: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a lock of the plugins and environments of the lock `old` as they are now, and the reasons why plugins no longer exist.

    The reasons are a mapping by `kind/name`; plugins that no longer exist are not in the new lock.
    """
    plugins, gone = [], {}
    hashes: dict[str, str] = {}
    for ref in refs_of(old):
        try:
            plugins.append(pinned(ref, hashes))
        except PluginError as error:
            gone[f"{ref.kind}/{ref.name}"] = error.message
    paths = {role: found["path"] for role, found in old.get("environments", {}).items()}
    return _assembled(plugins, paths), gone


def refs_of(lock: Mapping[str, Any]) -> list[PluginRef]:
    """Return references to the plugins of a lock, without their configs."""
    keys = ("kind", "name", "distribution", "path", "attribute")
    return [PluginRef(**{k: item[k] for k in keys if k in item}) for item in lock["plugins"]]


def read_lock(path: Path) -> dict[str, Any]:
    """Read a lock file, or the lock file in a run directory.

    Raises:
        PluginError: the file does not exist or can't be read.
    """
    place = path / FILE_NAME if path.is_dir() else path
    try:
        lock = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PluginError(
            f"there is no plugin lock at {place}", hint="`dovetail plugins lock` writes one"
        ) from error
    except (OSError, ValueError) as error:
        raise PluginError(f"the plugin lock {place} can't be read: {error}") from error
    if not isinstance(lock, dict) or lock.get("schema") != SCHEMA:
        found = lock.get("schema") if isinstance(lock, dict) else None
        raise PluginError(
            f"the plugin lock {place} has schema {found!r}; this dovetail-core reads schema {SCHEMA}",
            hint="`dovetail plugins lock` writes a new one",
        )
    return lock


def write_lock(path: Path, lock: Mapping[str, Any]) -> None:
    """Write a lock to a JSON file."""
    path.write_text(json.dumps(lock, indent=2) + "\n", encoding="utf-8")


def _assembled(
    entries: Iterable[dict[str, Any]], environments: Mapping[str, str]
) -> dict[str, Any]:
    once = {(item["kind"], item["name"], item.get("path")): item for item in entries}
    plugins = [once[key] for key in sorted(once, key=str)]
    lock: dict[str, Any] = {
        "schema": SCHEMA,
        "python": platform.python_version(),
        "packages": packages_of(item["distribution"] for item in plugins if "distribution" in item),
        "plugins": plugins,
    }
    if environments:
        describe = _runtime_section(plugins).describe_environment
        lock["environments"] = {
            role: describe(role, path, plugins) for role, path in environments.items()
        }
    return lock


def _runtime_section(plugins: Iterable[Mapping[str, Any]]) -> type[RuntimeSection]:
    """Return the Config class of a lock's runtime plugin, for its `describe_environment`; RuntimeSection if the lock has no runtime."""
    runtime = next((item for item in plugins if item["kind"] == "runtime"), None)
    if runtime is None:
        return RuntimeSection
    keys = ("name", "path", "attribute")
    section = {key: runtime[key] for key in keys if runtime.get(key) is not None}
    if "path" in section:
        del section["name"]
    return cast("type[RuntimeSection]", config_class("runtime", section))
