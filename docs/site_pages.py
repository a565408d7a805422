"""MkDocs hooks: pages generated from code and manifests, tables in pages written by hand, and links from one to the other.

`make site` runs them. Generated pages are not committed: what they are made from is.
"""

from __future__ import annotations

import fnmatch
import importlib
import itertools
import json
import posixpath
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

from dovetail.config.docs import field_docs
from dovetail.config.schema import bounds, describe, fields_of
from dovetail.config.serialise import plain_value
from dovetail.sections import RunConfig
from dovetail_console.plugin_page import shown
from dovetail_sdk import docs, docs_interfaces
from dovetail_sdk.docs_engines import engine_tables
from dovetail_sdk.docs_index import Plugins, heading, plugin_table
from dovetail_sdk.markdown import inline, table
from dovetail_sdk.project import Project, read_project
from dovetail_sdk.public import public_names

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)
"""Where a page written by hand wants a table."""
TARGETS = {
    "make test": "`make test`",
    "make nightly": "`make nightly`",
    "make proofs": "`make proofs`",
    "gpu": "on a GPU, by hand",
}
"""What runs a case, with its heading."""
TOPICS = {
    "kills": "kills: a run killed at random instants and at every named point, a damaged checkpoint, a full or read-only disk (`tests/end_to_end/test_kills*.py`)",
    "attacks": "attacks on the sandbox (`plugins/rewards/tests/attacks`)",
    "bad_inputs": "bad inputs, whose exit code and message are recorded (`tests/end_to_end/test_bad_inputs.py`)",
    "verl": "numerics against verl (`tests/end_to_end/test_verl_numerics.py`)",
    "trl": "numerics against TRL (`tests/end_to_end/test_trl_losses.py`)",
}
"""What `tests/evidence.py` counts, as the page says it."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def outside() -> dict[str, str]:
    """Return the pages that are kept outside docs/, by their path in the repository: where each is on the site."""
    found = {"README.md": "index.md", "records/README.md": "project/records.md"}
    for name in ("CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "SECURITY"):
        found[f"{name}.md"] = f"project/{name.lower().replace('_', '-')}.md"
    for folder, pattern in (
        ("packages", "plugins/*"),
        ("packages", "core"),
        ("packages", "sdk"),
        ("examples", "examples/*"),
    ):
        for file in sorted(ROOT.glob(f"{pattern}/README.md")):
            found[file.relative_to(ROOT).as_posix()] = f"{folder}/{file.parent.name}.md"
    return found


@cache
def projects() -> tuple[Project, ...]:
    """Return the packages of the repository."""
    folders = [
        ROOT / "core",
        ROOT / "sdk",
        *sorted(f.parent for f in ROOT.glob("plugins/*/pyproject.toml")),
    ]
    return tuple(map(read_project, folders))


@cache
def plugins() -> Plugins:
    """Return the plugins and rules of the repository, by kind and name."""
    return docs.plugins_of(projects())


def generated() -> dict[str, str]:
    """Return the text of every generated page by its place on the site."""
    texts = {
        f"plugins/{path}": text.partition("-->\n")[2]
        for path, text in docs.pages(projects()).items()
    }
    texts |= {f"interfaces/{name}": text for name, text in docs_interfaces.pages().items()}
    texts["reference/config.md"] = config_page()
    # Errors have a page of their own.
    texts |= {
        f"reference/python/{module}.md": api_page(module, names)
        for module, names in public_names().items()
        if module != "dovetail.errors"
    }
    return texts


def tables(name: str, page: str) -> list[str]:
    """Return the lines of the table that a page asks for.

    Args:
        name: `engines`, `interfaces`, `cases`, `conformance`, or a kind of plugin.
        page: where the page is on the site.

    Raises:
        ValueError: there is no such table.
    """
    if name == "engines":
        return list(engine_tables(projects()))
    if name == "interfaces":
        return docs_interfaces.interface_table()
    if name == "cases":
        return cases_table(collected()["counts"])
    if name == "conformance":
        return conformance_table(collected()["suites"])
    lines = plugin_table(
        name, plugins(), posixpath.relpath("plugins", posixpath.dirname(page) or ".") + "/"
    )
    if not lines:
        raise ValueError(
            f"{page} asks for a table {name!r}; expected engines, interfaces, cases, conformance or a kind of plugin"
        )
    return lines


@cache
def collected() -> dict[str, dict[str, dict[str, int]]]:
    """Return the cases of all tests, as `tests/evidence.py` counts them.

    Raises:
        RuntimeError: tests can't be collected.
    """
    with tempfile.NamedTemporaryFile() as file:
        command = [sys.executable, "tests/evidence.py", file.name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 - our own script
        if done.returncode:
            raise RuntimeError(f"tests/evidence.py failed:\n{done.stdout}{done.stderr}")
        return json.loads(Path(file.name).read_text())


def cases_table(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return how many cases each topic has, by what runs them."""
    rows = [
        (meaning, *(str(counts[topic].get(target, "")) for target in TARGETS))
        for topic, meaning in TOPICS.items()
    ]
    return table(("what", *TARGETS.values()), rows)


def conformance_table(suites: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return how many cases of its kind's suite each plugin has, by what runs them."""
    rows = [
        (
            f"[`{kind}/{name}`](plugins/{kind}/{name}.md)",
            *(str(suites.get(f"{kind}/{name}", {}).get(target, "")) for target in TARGETS),
        )
        for kind, name in sorted(plugins())
        if kind != "preflight"
    ]
    return table(("plugin", *TARGETS.values()), rows)


def config_page() -> str:
    """Return the page of all keys of a config, a chapter for each section."""
    chapters = [
        "# Config keys",
        "`dovetail config explain CONFIG KEY` prints the same of a key, with its value and where that came from.",
        "A key that selects a plugin takes its name, or a mapping: `name`, or `path` and `attribute` of a Python file, and the settings on [the plugin's page](../plugins/README.md). Those that all plugins of the kind have are here, too.",
    ]
    for section, rows in config_sections(RunConfig, "", ()):
        lines = table(("key", "type", "default", "allowed", "meaning"), rows)
        chapters += [f"## {section or 'Top level'}", "\n".join(lines)]
    return "\n\n".join(chapters) + "\n"


def config_sections(
    cls: type, path: str, left_out: Iterable[str]
) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield each section that a config can hold, by its key, with a row for each of its keys."""
    rows, below = [], []
    for name, field in fields_of(cls).items():
        if name in left_out:
            continue
        where = f"{path}.{name}" if path else name
        default = "required" if field.required else shown(plain_value(field.default()))
        default = f"`{field.plugin_default or default}`"
        kind = describe(field.type)
        if field.kind:
            anchor = heading(field.kind).lower().replace(" ", "-")
            kind = f"[{field.kind.replace('_', ' ')}](../plugins/README.md#{anchor})"
        elif field.section:
            named = get_origin(field.type) is dict
            section = f"{where}.NAME" if named else where
            kind = f"[{'sections by name' if named else 'section'}](#{section.lower().replace('.', '')})"
            default = ""
            below.append((field.section, section, ()))
        if field.kind and field.section and not field.collection:
            below.append((field.section, where, ("name", "path", "attribute")))
        meaning = inline(" ".join(field_docs(cls).get(name, "").split()))
        rows.append((f"`{where}`", kind, default, bounds(field.attribute), meaning))
    if rows:
        yield path, rows
    for section_class, where, without in below:
        yield from config_sections(section_class, where, without)


def api_page(module: str, names: Iterable[str]) -> str:
    """Return the page of a public module: each name with its signature and docstring."""
    loaded = importlib.import_module(module)
    blocks = []
    for name in sorted(names):
        value: Any = getattr(loaded, name)
        home = getattr(value, "__module__", None)
        if (
            isinstance(home, str)
            and home.partition(".")[0].startswith("dovetail")
            and hasattr(value, "__qualname__")
        ):
            blocks.append(f"::: {home}.{value.__qualname__}")
    summary = (loaded.__doc__ or "").partition("\n")[0]
    return "\n\n".join([f"# {module}", summary, *blocks]) + "\n"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages and those that are kept outside docs/, and fill the patterns of the navigation."""
    from mkdocs.structure.files import File  # tests use this module without MkDocs

    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    for source, path in outside().items():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / source)))
    config.nav = filled(
        config.nav or [], sorted(file.src_uri for file in files.documentation_pages())
    )
    return files


def filled(nav: list[Any], pages: list[str]) -> list[Any]:
    """Return a navigation in which each pattern, such as `interfaces/*.md`, is the pages that match it and no other entry names."""
    named = set(re.findall(r"'([^'*]+\.md)'", repr(nav)))

    def entries(below: Any) -> Iterator[Any]:
        for entry in below if isinstance(below, list) else [below]:
            if isinstance(entry, dict):
                yield {
                    title: part if isinstance(part, str) and "*" not in part else [*entries(part)]
                    for title, part in entry.items()
                }
            elif "*" in entry:
                found = [page for page in fnmatch.filter(pages, entry) if page not in named]
                yield from by_kind(found) if entry.startswith("plugins/") else found
            else:
                yield entry

    return [*entries(nav)]


def by_kind(pages: list[str]) -> Iterator[dict[str, list[str]]]:
    """Yield the pages of each kind of plugin, in order, below what the kind is called."""
    for kind, own in itertools.groupby(pages, key=lambda page: page.split("/")[1]):
        yield {heading(kind): list(own)}


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put tables in their places, and point links to where the pages are on the site."""
    here = page.file.src_uri
    source = next((path for path, place in outside().items() if place == here), f"docs/{here}")
    markdown = PLACE.sub(lambda match: "\n".join(tables(match[1], here)), markdown)
    return with_site_links(markdown, source) if (ROOT / source).is_file() else markdown


def with_site_links(text: str, source: str) -> str:
    """Return the text of a committed page with its links as the site needs them.

    Args:
        text: Markdown.
        source: the page's path in the repository.
    """
    homes = outside()
    here = homes.get(source) or source.removeprefix("docs/")

    def link(match: re.Match[str]) -> str:
        bang, label, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        place = homes.get(path) or homes.get(f"{path}/README.md")
        if path.startswith("docs/"):
            place = path.removeprefix("docs/")
        if place:
            target = posixpath.relpath(place, posixpath.dirname(here) or ".")
            return f"{bang}[{label}]({target}{anchor or ''})"
        # The rest of the repository is not on the site.
        return f"{label} (`{path}`)" if (ROOT / path).exists() else match[0]

    return LINK.sub(link, text)
