"""objective_spec: an objective by name and settings, as workers get it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import attrs

from dovetail.interfaces.objective import Objective, ObjectiveSpec
from dovetail.plugins.files import resolve
from dovetail.plugins.load import config_class, load_plugin_class, ref_for
from dovetail.sections import PluginSection


def objective_spec(
    plugin: str | PluginSection, *, scalars: Mapping[str, float] | None = None, **settings: Any
) -> ObjectiveSpec:
    """Return the spec of an objective.

    Args:
        plugin: its name (`name@distribution` settles a conflict), or a section that selects it by name or by file.
        scalars: weights that differ from their defaults.
        settings: fields of its Config.

    Raises:
        PluginError: it can't be found or loaded.
        ConfigError: it has no such scalar.
    """
    chosen = PluginSection(name=plugin) if isinstance(plugin, str) else plugin
    selects = {"name": chosen.name, "path": chosen.path, "attribute": chosen.attribute}
    config = config_class("objective", selects)
    whole = isinstance(chosen, config)
    section = attrs.evolve(chosen, **settings) if whole else config(**selects, **settings)
    # Workers may have another current directory.
    parts = {field.name: getattr(section, field.name) for field in attrs.fields(config)}
    files: dict[str, Any] = {
        name: attrs.evolve(part, path=str(resolve(part.path)))
        for name, part in parts.items()
        if isinstance(part, PluginSection) and part.path is not None
    }
    ref = ref_for("objective", attrs.evolve(section, **files))
    cls = cast("type[Objective]", load_plugin_class(ref))
    return cls.spec(ref, scalars or {})
