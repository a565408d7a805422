"""The page of engines: its tables of capabilities, from the manifests; the text around them is written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from dovetail.errors import PluginError
from dovetail.plugins.manifest import read_manifest_file
from dovetail_sdk.docs_capabilities import CAPABILITIES, EVERYWHERE
from dovetail_sdk.manifest import manifest_path
from dovetail_sdk.markdown import table
from dovetail_sdk.project import Project

KINDS = {"rollout": "Rollout engines", "engine": "Training engines"}
"""Kinds whose capabilities are compared, and the heading of each."""
BEGIN = "<!-- capabilities: written by `make docs` from the manifests -->"
END = "<!-- end of capabilities -->"


def page(projects: Iterable[Project], file: Path) -> str:
    """Return a page with its tables written anew.

    Args:
        projects: packages whose manifests are written.
        file: a Markdown file that holds both marks, each on a line of its own.

    Raises:
        PluginError: there is no such file, or not both marks in it.
    """
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise PluginError(
            f"{file} does not hold the marks between which capabilities are written",
            hint=f"put the lines {BEGIN} and {END} where the tables belong",
        )
    return "\n".join([before + BEGIN, "", *_tables(projects), END + after])


def _tables(projects: Iterable[Project]) -> Iterator[str]:
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
