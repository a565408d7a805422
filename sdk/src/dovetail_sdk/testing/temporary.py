"""A temporary registry: plugins that are installed only within a `with` block, and only for this process."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dovetail.errors import PluginError
from dovetail.interfaces import Plugin
from dovetail.plugins.contract import config_of
from dovetail.plugins.distributions import Installed
from dovetail.plugins.entry import PluginEntry
from dovetail.plugins.index import PluginIndex, default_index
from dovetail.plugins.manifest import PluginManifest

DISTRIBUTION = "temporary-plugins"
VERSION = "0"
_MODULE = "_dovetail_temporary_plugins"


class _Nowhere(Distribution):
    """Metadata of the made-up distribution to which temporary plugins belong; nothing of it is on disk."""

    def read_text(self, filename: str) -> str | None:
        text = f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {VERSION}\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


@contextmanager
def temporary_plugins(*classes: type[Plugin]) -> Iterator[PluginIndex]:
    """Register plugins for the duration of the context, so that a config can select them by name.

    The classes replace installed plugins of the same kind and name. Workers in other processes do not see these classes. Contexts
    may be nested.

    Args:
        classes: complete plugin classes; the interface that a class extends determines its kind.

    Raises:
        PluginError: a class extends no interface of a plugin.
    """
    before = default_index()
    kinds = {cls: _kind_of(cls) for cls in classes}
    module = types.ModuleType(f"{_MODULE}_{id(classes):x}")
    mine = [_entry(cls, kinds[cls], module) for cls in classes]
    taken = {(entry.kind, entry.name) for entry in mine}
    kept = tuple(e for e in before.all_entries if (e.kind, e.name) not in taken)
    points = tuple(entry.entry_point for entry in mine if entry.entry_point is not None)
    home = Installed(DISTRIBUTION, VERSION, None, points, _Nowhere())
    others = tuple(one for one in before.distributions if one.name != DISTRIBUTION)
    index = PluginIndex((*kept, *mine), before.problems, (*others, home), before.kinds)
    sys.modules[module.__name__] = module
    _put(index)
    try:
        yield index
    finally:
        _put(before)
        del sys.modules[module.__name__]


def _put(index: PluginIndex) -> None:
    """Make this the plugin index of the process: `default_index`, which every module calls, returns it from here on."""
    default_index.cache_clear()
    with patch.object(PluginIndex, "discover", return_value=index):
        default_index()


def _kind_of(cls: type[Plugin]) -> str:
    mro = {f"{base.__module__}:{base.__qualname__}" for base in cls.__mro__}
    for name, kind in default_index().kinds.items():
        if kind.interface in mro:
            return name
    raise PluginError(
        f"{cls.__qualname__} does not extend a plugin interface",
        hint=f"extend one of {', '.join(kind.interface for kind in default_index().kinds.values())}",
    )


def _entry(cls: type[Plugin], kind: str, module: types.ModuleType) -> PluginEntry:
    config = config_of(cls, default_index().kinds[kind])
    setattr(module, cls.__name__, cls)
    config_name = f"Config_{cls.__name__}"
    setattr(module, config_name, config)
    target = f"{module.__name__}:{cls.__name__}"
    manifest = PluginManifest(
        kind=kind,
        name=cls.name,
        target=target,
        api=cls.api,
        config=f"{module.__name__}:{config_name}",
        aliases=tuple(cls.aliases),
        capabilities=tuple(sorted(cls.capabilities)),
    )
    return PluginEntry(
        kind=kind,
        name=cls.name,
        distribution=DISTRIBUTION,
        version=VERSION,
        target=target,
        state="compatible",
        manifest=manifest,
        entry_point=EntryPoint(
            name=cls.name, value=target, group=default_index().kinds[kind].group
        ),
    )
