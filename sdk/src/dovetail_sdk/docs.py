"""Docs pages of plugins, made from their manifests: one a plugin, and an index."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from dovetail.errors import PluginError
from dovetail.plugins.manifest import PluginManifest, read_manifest_file
from dovetail.plugins.page import PAPER, ColumnNote, Page, Setting, page_of
from dovetail_sdk.manifest import manifest_path
from dovetail_sdk.project import Project

COMMAND = "python -m dovetail_sdk docs"
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
"""The kinds of plugin that have pages, in the order of the index."""

_MARK = f"<!-- Written by `{COMMAND}` from the plugins' docstrings, columns and config classes: change those. -->"
_ABOUT = (
    "What a config can select by name under `algorithm`, and what is checked before a run. "
    "`dovetail plugins show KIND/NAME` prints the same pages, those of other packages included."
)
_INTRODUCTIONS = {
    "preset": "A published combination of the parts below. `algorithm.preset: <name>` selects it; every key that is given besides wins.",
    "advantage": "Rewards to advantages.",
    "policy_loss": "What a token's loss is.",
    "loss_aggregation": "How token losses become one number.",
    "kl_controller": "How the weight of a KL penalty moves.",
    "rollout_correction": "What makes up for a rollout policy that is not the training policy.",
    "sample_filter": "What leaves samples out of training.",
    "preflight": "What `dovetail check` and the start of a run look for. All of them are active.",
}


def pages(projects: Iterable[Project]) -> dict[PurePosixPath, str]:
    """The text of every page, by its path below the output folder, the index among them.

    Raises:
        PluginError: two packages have a plugin of one kind and name, or a package has no usable manifest.
    """
    plugins: dict[tuple[str, str], PluginManifest] = {}
    for project in projects:
        if not project.plugins:
            continue
        for plugin in read_manifest_file(manifest_path(project), project.distribution).plugins:
            if plugin.kind not in HEADINGS:
                continue
            if (plugin.kind, plugin.name) in plugins:
                raise PluginError(
                    f"{plugin.kind}/{plugin.name} is in two packages, the second of them {project.distribution}",
                    hint="name one of the two, or rename the plugin",
                )
            plugins[plugin.kind, plugin.name] = plugin
    made = [page_of(plugin) for plugin in plugins.values()]
    known = set(plugins)
    texts = {_path(page.kind, page.name): _page(page, known) for page in made}
    return {PurePosixPath("README.md"): _index(made), **texts}


def write(projects: Iterable[Project], output: Path) -> int:
    """Write every page, and remove pages that were written for plugins that are gone; how many there are."""
    texts = pages(projects)
    for path, text in texts.items():
        file = output / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
    for stale in _stale(texts, output):
        stale.unlink()
        if not any(stale.parent.iterdir()):
            stale.parent.rmdir()
    return len(texts)


def drift(projects: Iterable[Project], output: Path) -> list[str]:
    """How the pages on disk differ from what would be written; empty where they do not."""
    texts = pages(projects)
    found = []
    for path, text in texts.items():
        file = output / path
        if not file.is_file():
            found.append(f"{file} does not exist")
        elif file.read_text(encoding="utf-8") != text:
            found.append(f"{file} is not what its plugin says now")
    return found + [f"{file} is of a plugin that is gone" for file in _stale(texts, output)]


def _path(kind: str, name: str) -> PurePosixPath:
    return PurePosixPath(kind, f"{name}.md")


def _stale(texts: Mapping[PurePosixPath, str], output: Path) -> list[Path]:
    """Written pages that nothing stands behind any more; files of another origin are left alone."""
    return [
        file
        for kind in HEADINGS
        for file in sorted((output / kind).glob("*.md"))
        if PurePosixPath(kind, file.name) not in texts
        and file.read_text(encoding="utf-8").startswith(_MARK)
    ]


def _index(made: Sequence[Page]) -> str:
    lines = [
        _MARK,
        "# Algorithms",
        "",
        _ABOUT,
    ]
    for kind, heading in HEADINGS.items():
        mine = sorted((page for page in made if page.kind == kind), key=lambda page: page.name)
        if not mine:
            continue
        rows = [
            (
                f"[`{page.name}`]({_path(kind, page.name)})",
                _inline(page.summary),
                _links(page.papers),
            )
            for page in mine
        ]
        lines += ["", f"## {heading}", "", _INTRODUCTIONS[kind], ""]
        width = 3 if any(page.papers for page in mine) else 2
        lines += _table(("name", "", "paper")[:width], [row[:width] for row in rows])
    return "\n".join(lines) + "\n"


def _page(page: Page, known: set[tuple[str, str]]) -> str:
    chapters = [
        _MARK + f"\n# {page.name}",
        f"{_singular(page.kind)} · [all algorithms](../README.md)",
    ]
    chapters.append(_prose(page.doc or page.summary))
    chapters += _columns("Requires", page.requires)
    chapters += _columns("Provides", page.provides)
    if page.capabilities:
        chapters += ["## Capabilities", ", ".join(f"`{name}`" for name in page.capabilities)]
    if page.settings:
        rows = [
            (
                f"`{s.name}`",
                s.type,
                _default(s),
                s.allowed,
                _inline(s.doc),
            )
            for s in page.settings
        ]
        table = _table(("key", "type", "default", "allowed", "meaning"), rows)
        chapters += ["## Settings", "\n".join(table)]
    chapters += _config(page)
    if page.stands_for:
        chapters += ["## What it stands for", _fenced(page.stands_for)]
        chapters += _made_of(page, known)
    return "\n\n".join(chapters) + "\n"


def _config(page: Page) -> Iterator[str]:
    if not page.example:
        return
    yield "## In a config"
    if page.kind == "preflight":
        yield "It is active without being named. To silence it:"
    yield _fenced(page.example)
    if page.places[1:]:
        yield "Or at " + ", ".join(f"`{place}`" for place in page.places[1:]) + "."


def _made_of(page: Page, known: set[tuple[str, str]]) -> Iterator[str]:
    parts = [
        f"[`{name}`](../{_path(kind, name)})" if (kind, name) in known else f"`{name}`"
        for kind, name in dict.fromkeys(page.parts)
    ]
    if parts:
        yield "Its parts: " + ", ".join(parts) + "."


def _columns(heading: str, notes: tuple[ColumnNote, ...] | None) -> Iterator[str]:
    if notes is None:
        yield f"## {heading}"
        yield "Depends on its config."
    elif notes:
        yield f"## {heading}"
        rows = [(f"`{note.name}`", note.holds, _inline(note.meaning)) for note in notes]
        yield "\n".join(_table(("column", "holds", "meaning"), rows))


def _default(setting: Setting) -> str:
    return setting.default if setting.default in ("", "required") else f"`{setting.default}`"


def _singular(kind: str) -> str:
    return HEADINGS[kind].removesuffix("s").replace("losse", "loss")


def _links(papers: Iterable[str]) -> str:
    return ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in papers)


def _fenced(yaml: str) -> str:
    return f"```yaml\n{yaml.rstrip()}\n```"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [headers, ["---"] * len(headers), *rows]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines]


def _prose(text: str) -> str:
    """A docstring as Markdown: papers are linked, and what stands indented is code."""
    blocks = text.split("\n\n")
    return "\n\n".join(block if block.startswith("    ") else _inline(block) for block in blocks)


def _inline(text: str) -> str:
    """Text between backticks as it is; elsewhere no `*`, `_` or `<` has Markdown's meaning, and papers are linked."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else _escaped(part) for part in parts)


def _escaped(text: str) -> str:
    text = re.sub(r"([*<]|(?<!\w)_|_(?!\w))", r"\\\1", text)
    return PAPER.sub(lambda match: f"[{match[0]}](https://arxiv.org/abs/{match[1]})", text)
