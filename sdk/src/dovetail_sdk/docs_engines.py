"""Tables of the capabilities of engines, from the manifests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dovetail.plugins.manifest import read_manifest_file
from dovetail_sdk.docs_capabilities import CAPABILITIES, EVERYWHERE
from dovetail_sdk.manifest import manifest_path
from dovetail_sdk.markdown import table
from dovetail_sdk.project import Project

KINDS = {"rollout": "Rollout engines", "engine": "Training engines"}
"""Headings of the capability tables, by kind of plugin."""


def engine_tables(projects: Iterable[Project]) -> Iterator[str]:
    """Yield the lines of two capability tables: rollout engines and training engines.

    Raises:
        PluginError: a package has no usable manifest.
    """
    claims: dict[str, dict[str, frozenset[str]]] = {kind: {} for kind in KINDS}
    for project in projects:
        if not project.plugins:
            continue
        for plugin in read_manifest_file(manifest_path(project), project.distribution).plugins:
            if plugin.kind in claims:
                claims[plugin.kind][plugin.name] = frozenset(plugin.capabilities)
    for kind, heading in KINDS.items():
        names = sorted(claims[kind])
        known = {**CAPABILITIES[kind], **EVERYWHERE}
        rows = [
            [f"`{name}`", *("yes" if name in claims[kind][engine] else "" for engine in names), doc]
            for name, doc in known.items()
        ]
        yield from (f"### {heading}", "")
        yield from table(["capability", *(f"`{name}`" for name in names), "what it promises"], rows)
        yield ""
