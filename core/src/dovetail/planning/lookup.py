"""Facts that several preflight rules need: the selected plugins, whether samples are generated, whether there is a critic."""

from __future__ import annotations

from typing import Any

import attrs

from dovetail.errors import DovetailError
from dovetail.interfaces.plugin import PluginConfig
from dovetail.planning.plan import Plan
from dovetail.sections import PluginSection, RunConfig


@attrs.frozen
class Selected:
    """A plugin's class with its config."""

    name: str
    cls: Any
    config: PluginConfig


def selected(kind: str, section: PluginSection | None) -> Selected | None:
    """Return the plugin that a section selects; None if there is none, or it can't be loaded.

    Preflight rules ignore a plugin that can't be loaded: the planner refuses it.
    """
    from dovetail.plugins.load import load_plugin_class, ref_for

    if section is None:
        return None
    try:
        ref = ref_for(kind, section)
        return Selected(ref.name, load_plugin_class(ref), section)
    except DovetailError:
        return None


def generates(config: RunConfig) -> bool:
    """Return whether the run generates its samples; otherwise it has neither rollout nor reward."""
    section, trainer = config.source, selected("trainer", config.trainer)
    if section is None and trainer is not None:
        section = PluginSection(name=trainer.cls.source(trainer.config))
    source = selected("source", section)
    return source is None or "rollout" in source.cls.roles


def has_critic(plan: Plan | None) -> bool:
    """Return whether a plan has a critic (a value model); False without a plan."""
    return plan is not None and any(model.role == "critic" for model in plan.models)
