"""Configs: YAML layers and overrides become one frozen, checked `RunConfig`. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.config.docs import field_docs
    from dovetail.config.fields import PluginSection, PresetSection
    from dovetail.config.load import LoadedConfig, config_from_mapping, load_config
    from dovetail.config.sections import RunConfig
    from dovetail.config.serialise import dump_yaml, to_mapping

_HOME = {
    "LoadedConfig": "load",
    "PluginSection": "fields",
    "PresetSection": "fields",
    "RunConfig": "sections",
    "config_from_mapping": "load",
    "dump_yaml": "serialise",
    "field_docs": "docs",
    "load_config": "load",
    "to_mapping": "serialise",
}

__all__ = [
    "LoadedConfig",
    "PluginSection",
    "PresetSection",
    "RunConfig",
    "config_from_mapping",
    "dump_yaml",
    "field_docs",
    "load_config",
    "to_mapping",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
