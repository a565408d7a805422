"""The plugins that a config selects, resolved and imported for the planner."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import attrs

from dovetail.interfaces.runtime import PluginRef
from dovetail.interfaces.stage import PlanFacts, SelectedPlugin
from dovetail.plugins.titles import called
from dovetail.sections import PluginSection, RunConfig


def source_facts(config: RunConfig) -> PlanFacts:
    """Return the facts of a run with only its trainer and experience source resolved, for work that needs no other plugin.

    Raises:
        PluginError: the trainer or the experience source can't be found or loaded.
    """
    chosen: dict[str, SelectedPlugin] = {}
    _select([("trainer", "trainer", config.trainer)], chosen)
    trainer, section = chosen["trainer"], config.source
    if section is None:
        name = called(lambda: f"`source` of {trainer.title}", trainer.cls.source, trainer.config)
        section = PluginSection(name=name)
    _select([("source", "source", section)], chosen)
    return PlanFacts(config=config, plugins=chosen, updates_per_step=1)


def choose(config: RunConfig) -> dict[str, SelectedPlugin]:
    """Return every plugin that the config selects, directly or through another plugin, resolved and imported, by key path.

    Raises:
        PluginError: a plugin can't be found or loaded.
        PlanError: the experience source does not support what the config asks for.
    """
    facts = source_facts(config)
    source, chosen = facts.plugins["source"], dict(facts.plugins)
    _select(config.plugin_sections(), chosen)
    facts = attrs.evolve(facts, plugins=chosen)
    for using in (chosen["algorithm.stage_set"], source):
        what = f"`selects` of {using.title}"
        selected = called(what.__str__, using.cls.selects, using.config, facts)
        _select([(path, *inner) for path, inner in selected.items()], chosen)
    return chosen


def _select(
    sections: Iterable[tuple[str, str, PluginSection | None]], chosen: dict[str, SelectedPlugin]
) -> None:
    """Add to `chosen` the plugins that the sections (key path, kind, section) select, and the plugins that these plugins select."""
    from dovetail.plugins.load import load_plugin_class, ref_for

    waiting = deque(sections)
    while waiting:
        path, kind, section = waiting.popleft()
        if section is None:
            continue
        ref = ref_for(kind, section)
        chosen[path] = SelectedPlugin(path, ref, load_plugin_class(ref), section)
        selects = getattr(chosen[path].cls, "selects", None)
        if selects is not None and kind not in (
            "source",
            "stage_set",
        ):  # their plugins have other key paths
            waiting += [(f"{path}.{key}", *inner) for key, inner in selects(section).items()]


def refs_of(chosen: Mapping[str, SelectedPlugin]) -> dict[str, PluginRef]:
    """Return the reference of each selected plugin, by key path."""
    return {path: plugin.ref for path, plugin in chosen.items()}
