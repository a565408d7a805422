"""The index of the docs pages: a template written by hand, with a table of each kind of plugin."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dovetail.plugins.manifest import PluginManifest
from dovetail_console.plugin_page import page_of
from dovetail_sdk.markdown import inline, links, table

HEADINGS = {
    "preset": "Presets",
    "advantage": "Advantage estimators",
    "policy_loss": "Policy losses",
    "loss_aggregation": "Loss aggregations",
    "kl_controller": "KL controllers",
    "rollout_correction": "Rollout corrections",
    "sample_filter": "Sample filters",
    "preflight": "Preflight rules",
}
"""The kinds of plugin that have pages, and preflight rules, in the order of the index."""

RULE, RULES = "preflight", "preflight.md"
"""Rules share a page: their key among the headings, and the page."""
TEMPLATE = "_index.md"
"""The template's name in the output folder; where there is none, the index is the tables under their headings."""
_PLACE = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)
"""Where a template wants the table of a kind."""

_NEEDS = {
    "values": "critic",
    "ref_log_probs": "reference",
    "baseline_scores": "greedy response",
    "reward_components": "reward with components",
}
"""Columns that cost a model or a response more, and what those are."""

Plugins = Mapping[tuple[str, str], PluginManifest]


def index(plugins: Plugins, template: str | None) -> str:
    """Return the index's text.

    Args:
        plugins: by kind and name.
        template: Markdown in which `<!-- table: KIND -->`, alone on a line, stands for that kind's table; tables that
            it does not place follow at the end. None for the tables alone.
    """
    text = "# Algorithms\n" if template is None else template.rstrip() + "\n"
    placed = set(_PLACE.findall(text))
    text = _PLACE.sub(lambda place: "\n".join(_table(place[1], plugins)), text)
    for kind, heading in HEADINGS.items():
        lines = [] if kind in placed else _table(kind, plugins)
        if lines:
            text += "\n".join(["", f"## {heading}", "", *lines, ""])
    return text


def page_path(kind: str, name: str) -> str:
    """Return where a plugin is described, below the output folder: a page of its own, or its heading on that of all rules."""
    return f"{RULES}#{name}" if kind == RULE else f"{kind}/{name}.md"


def _table(kind: str, plugins: Plugins) -> list[str]:
    """Name, what it is, needs, papers; a column that says nothing for any plugin is left out."""
    pages = [page_of(plugins[key]) for key in sorted(plugins) if key[0] == kind]
    if not pages:
        return []
    rows = [
        (
            f"[`{page.name}`]({page_path(kind, page.name)})",
            inline(page.summary),
            ", ".join(dict.fromkeys(_needs(plugins[kind, page.name], plugins))),
            links(page.papers),
        )
        for page in pages
    ]
    headers = ("name", "", "needs", "paper")
    used = [i for i in range(len(headers)) if i < 2 or any(row[i] for row in rows)]
    return table([headers[i] for i in used], [[row[i] for i in used] for row in rows])


def _needs(plugin: PluginManifest, plugins: Plugins) -> Iterator[str]:
    """What has to be there besides the policy: for a preset, what its parts and its KL penalty need."""
    if plugin.kind == "advantage" and (plugin.facts or {}).get("min_group_size", 1) > 1:
        yield f"n ≥ {(plugin.facts or {})['min_group_size']}"
    yield from (what for column, what in _NEEDS.items() if column in (plugin.requires or ()))
    for part in page_of(plugin).parts:
        if part in plugins:
            yield from _needs(plugins[part], plugins)
    algorithm = (plugin.settings or {}).get("algorithm")
    kl = algorithm.get("kl") if isinstance(algorithm, Mapping) else None
    if isinstance(kl, Mapping) and any(kl.values()):
        yield _NEEDS["ref_log_probs"]
