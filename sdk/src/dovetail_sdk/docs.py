"""Docs pages of plugins, made from their manifests: one a plugin, and an index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from dovetail.config.plugin_page import ColumnNote, Page, Setting, page_of
from dovetail.errors import PluginError
from dovetail.plugins.manifest import read_manifest_file
from dovetail_sdk.docs_index import HEADINGS, TEMPLATE, Plugins, index, page_path
from dovetail_sdk.manifest import manifest_path
from dovetail_sdk.markdown import fenced, inline, prose, table
from dovetail_sdk.project import Project

COMMAND = "python -m dovetail_sdk docs"
INDEX = PurePosixPath("README.md")

_MARK = f"<!-- Written by `make docs` (`{COMMAND}`)"
_FROM_PLUGIN = f"{_MARK} from the plugin's docstring, columns and config class: change those. -->"
_COLUMNS = ("key", "type", "default", "allowed", "meaning")
_FROM_ALL = f"{_MARK} from the plugins and {TEMPLATE}: change those. -->"


def pages(projects: Iterable[Project], template: str | None = None) -> dict[PurePosixPath, str]:
    """The text of every page, by its path below the output folder, the index among them.

    Args:
        projects: packages whose manifests are written.
        template: of the index; see `dovetail_sdk.docs_index.index`.

    Raises:
        PluginError: no package has a plugin that has a page, two have one of the same kind and name, or one has no
            usable manifest.
    """
    plugins = _plugins(projects)
    texts = {page_path(*key): _page(page_of(plugin), plugins) for key, plugin in plugins.items()}
    return {INDEX: f"{_FROM_ALL}\n{index(plugins, template)}", **texts}


def write(projects: Iterable[Project], output: Path, *, prune: bool = False) -> int:
    """Write the packages' pages; how many there are.

    Args:
        projects: the packages. For errors see `pages`.
        output: where the pages go.
        prune: these are all the packages there are, so that pages of other plugins are of plugins that are gone: remove
            them. Without it they stay, and where there are any, so does the index, which lists them.
    """
    texts = _texts(projects, output)
    stale = _others(texts, output)
    if stale and not prune:
        del texts[INDEX]
    for path, text in texts.items():
        file = output / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
    for file in stale if prune else ():
        file.unlink()
        if not any(file.parent.iterdir()):
            file.parent.rmdir()
    return len(texts)


def drift(projects: Iterable[Project], output: Path, *, prune: bool = False) -> list[str]:
    """How the pages on disk differ from what `write` would leave there; empty where they do not."""
    texts = _texts(projects, output)
    stale = _others(texts, output)
    if stale and not prune:
        del texts[INDEX]
    found = []
    for path, text in texts.items():
        file = output / path
        if not file.is_file():
            found.append(f"{file} does not exist")
        elif file.read_text(encoding="utf-8") != text:
            found.append(f"{file} is not what its plugin says now")
    return found + [f"{file} is of a plugin that is gone" for file in (stale if prune else ())]


def _plugins(projects: Iterable[Project]) -> Plugins:
    """Every plugin that has a page. For errors see `pages`."""
    plugins, names = {}, []
    for project in projects:
        names.append(project.distribution)
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
    if not plugins:
        raise PluginError(
            f"no plugin that has a page is in {', '.join(names) or 'any package, since none is named'}; the kinds with "
            f"pages are {', '.join(HEADINGS)}",
            hint=f"name the folders of the packages: {COMMAND} core plugins/algorithms",
        )
    return plugins


def _texts(projects: Iterable[Project], output: Path) -> dict[PurePosixPath, str]:
    template = output / TEMPLATE
    return pages(projects, template.read_text(encoding="utf-8") if template.is_file() else None)


def _others(texts: Mapping[PurePosixPath, str], output: Path) -> list[Path]:
    """Written pages of plugins that are not among these; files of another origin are left alone."""
    return [
        file
        for kind in HEADINGS
        for file in sorted((output / kind).glob("*.md"))
        if PurePosixPath(kind, file.name) not in texts
        and file.read_text(encoding="utf-8").startswith(_MARK)
    ]


def _page(page: Page, known: Plugins) -> str:
    chapters = [
        f"{_FROM_PLUGIN}\n# {page.name}",
        f"{_singular(page.kind)} · [all algorithms](../README.md)",
    ]
    chapters.append(prose(page.doc or page.summary))
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
                inline(s.doc),
            )
            for s in page.settings
        ]
        chapters += ["## Settings", "\n".join(table(_COLUMNS, rows))]
    chapters += _config(page)
    if page.stands_for:
        chapters += ["## What it stands for", fenced(page.stands_for)]
        chapters += _made_of(page, known)
    return "\n\n".join(chapters) + "\n"


def _config(page: Page) -> Iterator[str]:
    if not page.example:
        return
    yield "## In a config"
    if page.kind == "preflight":
        yield "It is active without being named. To silence it:"
    yield fenced(page.example)
    if page.places[1:]:
        yield "Or at " + ", ".join(f"`{place}`" for place in page.places[1:]) + "."


def _made_of(page: Page, known: Plugins) -> Iterator[str]:
    parts = [
        f"[`{name}`](../{page_path(kind, name)})" if (kind, name) in known else f"`{name}`"
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
        rows = [(f"`{note.name}`", note.holds, inline(note.meaning)) for note in notes]
        yield "\n".join(table(("column", "holds", "meaning"), rows))


def _default(setting: Setting) -> str:
    return setting.default if setting.default in ("", "required") else f"`{setting.default}`"


def _singular(kind: str) -> str:
    return HEADINGS[kind].removesuffix("s").replace("losse", "loss")
