"""The plugin lock, `plugins.lock.json`: exactly which plugins a run used, and what has changed since."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import PluginError
from dovetail.interfaces.runtime import PluginRef
from dovetail.plugins.distributions import Installed
from dovetail.plugins.files import content_hash, load_file_class, resolve
from dovetail.plugins.index import default_index
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.load import find
from dovetail.plugins.manifest import normalised, package_directories

FILE_NAME = "plugins.lock.json"
SCHEMA = 1


def lock_for(refs: Iterable[PluginRef]) -> dict[str, Any]:
    """Describe these plugins as they are now: versions, interface ranges, and hashes of what can change.

    A released wheel is pinned by its version; an editable install and a file by the SHA-256 of their content.

    Raises:
        PluginError: one of them is no longer there.
    """
    locked = {(ref.kind, ref.name, ref.path): _locked(ref) for ref in refs}
    return {
        "schema": SCHEMA,
        "python": platform.python_version(),
        "plugins": [locked[key] for key in sorted(locked, key=str)],
    }


def refs_of(lock: Mapping[str, Any]) -> list[PluginRef]:
    """References to the plugins of a lock, without their configs."""
    return [
        PluginRef(
            kind=item["kind"],
            name=item["name"],
            distribution=item.get("distribution"),
            path=item.get("path"),
            attribute=item.get("attribute"),
        )
        for item in lock["plugins"]
    ]


def read_lock(path: Path) -> dict[str, Any]:
    """Read a lock file, or the one in a run directory.

    Raises:
        PluginError: there is none, or it can't be read.
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
            f"the plugin lock {place} has schema {found!r}; this dovetail-core reads {SCHEMA}"
        )
    return lock


def write_lock(path: Path, lock: Mapping[str, Any]) -> None:
    """Write a lock as JSON."""
    path.write_text(json.dumps(lock, indent=2) + "\n", encoding="utf-8")


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What changed between two locks: (warnings, refusals).

    Another version, another content or another choice of plugins warns. Another distribution behind the same
    name, or another range of interface versions, refuses: the saved state may mean something else to it.
    """
    before, after = _by_key(old), _by_key(new)
    warnings, refusals = [], []
    for key in sorted(before.keys() | after.keys()):
        title = "/".join(key)
        if key not in after:
            warnings.append(f"{title} was used before and is no longer")
            continue
        if key not in before:
            warnings.append(f"{title} is used now and was not before")
            continue
        was, now = before[key], after[key]
        if _source(was) != _source(now):
            refusals.append(f"{title} came from {_source(was)} and comes from {_source(now)} now")
        elif was.get("api") != now.get("api"):
            refusals.append(
                f"{title} was made for interface {was.get('api')} and is for {now.get('api')} now"
            )
        else:
            if was.get("version") != now.get("version"):
                warnings.append(
                    f"{title} was version {was.get('version')}, now {now.get('version')}"
                )
            if was.get("sha256") != now.get("sha256"):
                warnings.append(
                    f"the code of {title} ({_source(now)}) has changed "
                    f"(SHA-256 {_short(was)}, now {_short(now)})"
                )
    return warnings, refusals


def _locked(ref: PluginRef) -> dict[str, Any]:
    if ref.path is not None:
        place = resolve(ref.path)
        cls = load_file_class(KINDS[ref.kind], str(place), ref.attribute or ref.name)
        return {
            "kind": ref.kind,
            "name": ref.name,
            "path": str(place),
            "attribute": ref.attribute,
            "api": cls.api,
            "sha256": content_hash(place),
        }
    entry = find(ref)
    locked: dict[str, Any] = {
        "kind": entry.kind,
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "api": entry.interface,
        "target": entry.target,
    }
    if _editable(_distribution(entry.distribution)):
        locked["sha256"] = _package_hash(entry.target.split(":")[0].split(".")[0])
    return locked


def _distribution(name: str) -> Installed:
    return next(d for d in default_index().distributions if normalised(d.name) == normalised(name))


def _editable(distribution: Installed) -> bool:
    """Whether pip installed it in place, so that its version says nothing about its code."""
    text = distribution.metadata.read_text("direct_url.json")
    try:
        return bool(text and json.loads(text).get("dir_info", {}).get("editable"))
    except ValueError:
        return False


def _package_hash(package: str) -> str:
    """SHA-256 over the names and contents of a package's files, in order of name."""
    digest = hashlib.sha256()
    for place in package_directories(package):
        for file in sorted(place.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(place)).encode() + b"\0")
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _by_key(lock: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(item["kind"], item["name"]): item for item in lock.get("plugins", [])}


def _source(item: Mapping[str, Any]) -> str:
    return str(item.get("distribution") or f"the file {item.get('path')}")


def _short(item: Mapping[str, Any]) -> str:
    return str(item.get("sha256") or "none")[:12]
