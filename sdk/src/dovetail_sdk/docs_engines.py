"""The page of engines: which one has which capability, from the manifests, between words that people write."""

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


def write(projects: Iterable[Project], page: Path) -> None:
    """Put the tables between the page's marks.

    Args:
        projects: packages whose manifests are written.
        page: a Markdown file that holds both marks, each on a line of its own.

    Raises:
        PluginError: there is no such file, or not both marks in it.
    """
    text = _renewed(projects, page)
    if text != page.read_text(encoding="utf-8"):
        page.write_text(text, encoding="utf-8")


def drift(projects: Iterable[Project], page: Path) -> list[str]:
    """How the page differs from what `write` would leave; empty where it does not. For errors see `write`."""
    if _renewed(projects, page) == page.read_text(encoding="utf-8"):
        return []
    return [f"{page} is not what the manifests say now"]


def _renewed(projects: Iterable[Project], page: Path) -> str:
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise PluginError(
            f"{page} does not hold the marks between which capabilities are written",
            hint=f"put the lines {BEGIN} and {END} where the tables belong",
        )
    return "\n".join([before + BEGIN, "", *_tables(list(projects)), END + after])


def _tables(projects: list[Project]) -> Iterator[str]:
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
