"""Tables of plugins by kind, and the index that is made of them."""

from __future__ import annotations

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
    "rollout": "Rollout engines",
    "engine": "Training engines",
    "dataset": "Dataset sources",
}
"""Headings of kinds, in the order of the index. Other kinds follow, with headings derived from their names."""

RULE, RULES = "preflight", "preflight.md"
"""Key of the preflight rules among the headings, and the path of the page with all rules."""

_NEEDS = {
    "values": "critic",
    "ref_log_probs": "reference",
    "baseline_scores": "greedy response",
    "reward_components": "reward with components",
}
"""Columns whose computation needs a further model or response, or a special reward; each with the text in the column `needs` of tables."""

Plugins = Mapping[tuple[str, str], PluginManifest]


def index(plugins: Plugins) -> str:
    """Return the text of the index: a table of plugins for each kind, below a heading."""
    kinds = sorted({kind for kind, _ in plugins})
    ordered = dict.fromkeys([*(kind for kind in HEADINGS if kind in kinds), *kinds])
    chapters = ["# Plugins"]
    for kind in ordered:
        chapters += [f"## {heading(kind)}", "\n".join(plugin_table(kind, plugins))]
    return "\n\n".join(chapters) + "\n"


def heading(kind: str) -> str:
    """Return the plural name of a kind, for headings."""
    return HEADINGS.get(kind) or f"{kind.replace('_', ' ').capitalize()}s"


def page_path(kind: str, name: str) -> str:
    """Return the path of a plugin's page below the output folder; for a preflight rule, the link to its heading on the rules' page."""
    return f"{RULES}#{name}" if kind == RULE else f"{kind}/{name}.md"


def plugin_table(kind: str, plugins: Plugins, folder: str = "") -> list[str]:
    """Return the lines of a kind's table (name, description, needs, papers) without columns that are empty for every plugin.

    Args:
        kind: the kind of plugin; a kind without plugins gives no lines.
        plugins: the plugins by kind and name.
        folder: the folder of the plugins' pages, relative to the table's page, such as `plugins/`.
    """
    pages = [page_of(plugins[key]) for key in sorted(plugins) if key[0] == kind]
    if not pages:
        return []
    rows = [
        (
            f"[`{page.name}`]({folder}{page_path(kind, page.name)})",
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
    """Yield a plugin's needs besides the policy; for a preset, the needs of its parts and its KL penalty."""
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
