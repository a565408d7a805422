"""Docs pages of plugins, made from their manifests: one for each plugin, one for all preflight rules (from their docstrings), and an
index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from dovetail.errors import PluginError
from dovetail.plugins.manifest import PluginManifest, read_manifest_file
from dovetail.plugins.rules import installed_rules
from dovetail_console.plugin_page import ColumnNote, Page, Setting, page_of
from dovetail_sdk.docs_index import RULE, RULES, Plugins, heading, index, page_path
from dovetail_sdk.manifest import manifest_path
from dovetail_sdk.markdown import fenced, inline, prose, table
from dovetail_sdk.project import Project

COMMAND = "python -m dovetail_sdk docs"
INDEX = "README.md"

_FROM_PLUGIN = f"<!-- Written by `{COMMAND}` from the plugin's docstring, columns and config class: change those. -->"
_COLUMNS = ("key", "type", "default", "allowed", "meaning")
_ABOUT_RULES = """Every rule is active. `dovetail check` and the start of a run print the rule's name in brackets after each of its findings. To switch rules off:

```yaml
preflight:
  ignore: [kl_twice, norm_length]
```"""


def pages(projects: Iterable[Project]) -> dict[str, str]:
    """Return the Markdown text of every plugin's docs page and of the index, by path below the output folder.

    Args:
        projects: packages with manifests; their preflight rules are read from the installed packages.

    Raises:
        PluginError: there is no plugin, two plugins share kind and name, or a package has no usable manifest.
    """
    projects = list(projects)
    plugins = plugins_of(projects)
    owners = {
        (p.kind, p.name): project.distribution for project in projects for p in project.plugins
    }
    found = {key: page_of(plugin) for key, plugin in plugins.items()}
    rules = [page for (kind, _), page in sorted(found.items()) if kind == RULE]
    texts = {INDEX: f"{_FROM_PLUGIN}\n{index(plugins)}"}
    if rules:
        texts[RULES] = _rules(rules)
    texts |= {
        page_path(*key): _page(page, plugins, owners[key])
        for key, page in found.items()
        if key[0] != RULE
    }
    return texts


def write(projects: Iterable[Project], output: Path) -> int:
    """Write every page below `output`, remove generated pages of plugins that are not in `projects`, and return the number of pages written.

    Files in `output` that were not generated are kept. For errors see `pages`.
    """
    texts = {output / path: text for path, text in pages(projects).items()}
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for file in sorted(output.rglob("*.md")):
        if file not in texts and file.read_text(encoding="utf-8").startswith(_FROM_PLUGIN):
            file.unlink()
            if not any(file.parent.iterdir()):
                file.parent.rmdir()
    return len(texts)


def plugins_of(projects: Iterable[Project]) -> Plugins:
    """Return the plugins and preflight rules of packages, by kind and name. For errors see `pages`."""
    plugins, names = {}, []
    for project in projects:
        names.append(project.distribution)
        if not project.plugins:
            continue
        for plugin in read_manifest_file(manifest_path(project), project.distribution).plugins:
            if (plugin.kind, plugin.name) in plugins:
                raise PluginError(
                    f"two of the named packages have the plugin {plugin.kind}/{plugin.name}; the second is {project.distribution}",
                    hint="name only one of the two packages, or rename the plugin",
                )
            plugins[plugin.kind, plugin.name] = plugin
    for rule in installed_rules():
        if rule.distribution in names:
            described = PluginManifest(RULE, rule.name, target="", api="", config="", doc=rule.doc)
            plugins[RULE, rule.name] = described
    if not plugins:
        raise PluginError(
            f"no package with plugins was named; the named packages are: {', '.join(names) or 'none'}",
            hint=f"name the folders of the packages: {COMMAND} core plugins/algorithms",
        )
    return plugins


def _rules(rules: Iterable[Page]) -> str:
    """Return the page of all preflight rules, which have neither settings nor columns."""
    chapters = [f"{_FROM_PLUGIN}\n# Preflight rules", "[all plugins](README.md)", _ABOUT_RULES]
    for rule in rules:
        chapters += [f"## {rule.name}", prose(rule.doc)]
    return "\n\n".join(chapters) + "\n"


def _page(page: Page, known: Plugins, distribution: str) -> str:
    chapters = [
        f"{_FROM_PLUGIN}\n# {page.name}",
        f"{_singular(page.kind)} of `{distribution}` · [all plugins](../README.md)",
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
    return heading(kind).removesuffix("s").replace("losse", "loss")
