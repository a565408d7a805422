"""objective_spec: an objective by name and settings, as workers get it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from dovetail.errors import ConfigError, nearest
from dovetail.interfaces.objective import Objective, ObjectiveSpec
from dovetail.plugins.load import config_class, load_plugin_class, ref_for


def objective_spec(
    plugin: str, *, scalars: Mapping[str, float] | None = None, **settings: Any
) -> ObjectiveSpec:
    """Return the spec of an installed objective.

    Args:
        plugin: its name; `name@distribution` settles a conflict.
        scalars: weights that differ from their defaults.
        settings: fields of its Config.

    Raises:
        PluginError: it can't be found or loaded.
        ConfigError: it has no such scalar.
    """
    section = config_class("objective", {"name": plugin})(name=plugin, **settings)
    ref = ref_for("objective", section)
    cls = cast("type[Objective]", load_plugin_class(ref))
    given = dict(scalars or {})
    for name in given.keys() - cls.scalars.keys():
        near = nearest(name, cls.scalars)
        raise ConfigError(
            f"{name!r} is no scalar of objective {plugin!r}; expected one of {sorted(cls.scalars)}",
            hint=f"did you mean {near!r}?" if near else None,
        )
    outputs = cls.outputs(section)
    reads = (output.reads for output in outputs)
    return ObjectiveSpec(
        plugin=ref,
        requires=cls.requires(section).union(*reads),
        outputs=outputs,
        scalars={**cls.scalars, **given},
    )
