"""The lock entry of a plugin: its version, and the hash of its code if the code can change without a new version."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from dovetail.interfaces.runtime import PluginRef
from dovetail.plugins.distributions import Installed
from dovetail.plugins.files import content_hash, load_file_class, resolve
from dovetail.plugins.index import default_index
from dovetail.plugins.load import find
from dovetail.plugins.manifest import normalised, package_directories


def pinned(ref: PluginRef, hashes: dict[str, str]) -> dict[str, Any]:
    """Return a plugin's entry in a lock: its identity, its version, and the SHA-256 of code that a version does not pin.

    Args:
        ref: the plugin.
        hashes: a cache of the SHA-256 of packages' files, by package; the plugin's package is hashed and added if it is missing.

    Raises:
        PluginError: the plugin no longer exists.
    """
    if ref.path is not None:
        place = resolve(ref.path)
        cls = load_file_class(default_index().kind(ref.kind), str(place), ref.attribute or ref.name)
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
        package = entry.target.split(":")[0].split(".")[0]
        if package not in hashes:
            hashes[package] = _package_hash(package)
        locked["sha256"] = hashes[package]
    return locked


def _distribution(name: str) -> Installed:
    return next(d for d in default_index().distributions if normalised(d.name) == normalised(name))


def _editable(distribution: Installed) -> bool:
    """Return whether a distribution is an editable install, whose code can change without a new version."""
    text = distribution.metadata.read_text("direct_url.json")
    try:
        return bool(text and json.loads(text).get("dir_info", {}).get("editable"))
    except ValueError:
        return False


def _package_hash(package: str) -> str:
    """Return the SHA-256 of the names and contents of a package's files, sorted by name."""
    digest = hashlib.sha256()
    for place in package_directories(package):
        for file in sorted(place.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(os.fsencode(file.relative_to(place)) + b"\0")
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
