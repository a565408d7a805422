"""The recipe of a run for its report: the algorithm in a line, the plugins as a table, the config as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PARTS = (
    ("preset", "preset {}"),
    ("advantage", "{} advantages"),
    ("policy_loss", "{} policy loss"),
    ("loss_aggregation", "{} aggregation"),
)
"""Keys of the config's section `algorithm`, each with the text for its plugin."""
_CRITIC = re.compile(r"^critic:.*\n(?:[ \t].*\n?|\n)*", re.MULTILINE)
"""A pattern of the critic's section in a config, as `dovetail.config.dump_yaml` writes it."""


def algorithm_line(config: str) -> str:
    """Return a resolved config's algorithm in one line, such as `preset dapo · grpo advantages · ppo_clip policy loss`.

    If `actor.objective` is set, the line names only the objective.

    Args:
        config: the config as YAML; damaged or empty YAML gives an empty line.
    """
    import yaml

    try:
        document = yaml.safe_load(config)
    except yaml.YAMLError:
        return ""
    if not isinstance(document, Mapping):
        return ""
    actor = document.get("actor")
    if isinstance(actor, Mapping) and (objective := actor.get("objective")):
        whole = objective if isinstance(objective, Mapping) else {}
        return f"objective {_name(objective) or whole.get('attribute')}"
    section = document.get("algorithm")
    if not isinstance(section, Mapping):
        return ""
    named = ((template, _name(section.get(key))) for key, template in _PARTS)
    return " · ".join(template.format(name) for template, name in named if name)


def _name(plugin: object) -> str:
    """Return the name of a chosen plugin, which is given as a mapping with `name`, or as the name."""
    name = plugin.get("name") if isinstance(plugin, Mapping) else plugin
    return name if isinstance(name, str) else ""


def without_critic(config: str) -> str:
    """Return a config without the critic's section, for runs without a critic."""
    return _CRITIC.sub("", config)


def plugin_table(lock: Any) -> dict[str, Any] | None:
    """Return the content of the plugin lock file as a table of columns and rows, or None if it lists no plugin."""
    entries = lock.get("plugins") if isinstance(lock, dict) else lock
    rows = [entry for entry in entries or [] if isinstance(entry, dict)]
    names = [
        name
        for name in ("kind", "name", "distribution", "version", "api", "path")
        if any(row.get(name) for row in rows)
    ]
    if not names:
        return None
    return {"columns": names, "rows": [[row.get(name) or "" for name in names] for row in rows]}
