"""Builds the spec of an objective from its name and settings, and the loss aggregation that an objective selects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import attrs

from dovetail.interfaces.objective import Objective, ObjectiveSpec
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.policy_loss import LossAggregation
from dovetail.plugins.files import resolve
from dovetail.plugins.load import config_class, load_plugin_class, make_plugin, ref_for
from dovetail.sections import PluginSection


def objective_spec(
    plugin: str | PluginSection, *, scalars: Mapping[str, float] | None = None, **settings: Any
) -> ObjectiveSpec:
    """Return the spec of an objective (plugin, config, columns, outputs), which a stage sends to an engine for an update.

    Args:
        plugin: the objective's name (`name@distribution` settles a conflict), or a section that selects the objective.
        scalars: numbers of the objective, such as loss weights, that replace its defaults.
        settings: fields of the objective's Config.

    Raises:
        PluginError: the plugin can't be found or loaded.
        ConfigError: the objective has no such scalar.
    """
    chosen = PluginSection(name=plugin) if isinstance(plugin, str) else plugin
    selects = {"name": chosen.name, "path": chosen.path, "attribute": chosen.attribute}
    config = config_class("objective", selects)
    whole = isinstance(chosen, config)
    section = attrs.evolve(chosen, **settings) if whole else config(**selects, **settings)
    # Make paths absolute: workers may have another current directory.
    parts = {field.name: getattr(section, field.name) for field in attrs.fields(config)}
    files: dict[str, Any] = {
        name: attrs.evolve(part, path=str(resolve(part.path)))
        for name, part in parts.items()
        if isinstance(part, PluginSection) and part.path is not None
    }
    ref = ref_for("objective", attrs.evolve(section, **files))
    cls = cast("type[Objective]", load_plugin_class(ref))
    return cls.spec(ref, scalars or {})


def loss_aggregation(section: PluginSection | None, context: PluginContext) -> LossAggregation:
    """Construct an objective's loss aggregation: the selected one, or `token_mean`.

    Args:
        section: the section that selects the aggregation; None for `token_mean`.
        context: the context of the objective; the aggregation gets the same seed.

    Raises:
        PluginError: the aggregation can't be found, loaded or constructed.
    """
    ref = ref_for("loss_aggregation", section or PluginSection(name="token_mean"))
    return cast("LossAggregation", make_plugin(ref, PluginContext(seed=context.seed)))
