"""The page of a plugin, from its manifest alone, which `plugins show` and the docs print."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_origin

from dovetail.batch import GLOSSARY, sizes_of
from dovetail.config import fields_of, format_path, plain_yaml
from dovetail.plugins import PluginManifest
from dovetail.sections import RunConfig

KeyPath = tuple[str | int, ...]

PAPER = re.compile(r"(?:arXiv[ :])?\b(\d{4}\.\d{4,5})\b")
"""A paper's number on arXiv, with or without the word before it."""

IN_A_CONFIG = "In a config:"
"""Heading of the docstring paragraph whose indented YAML is merged into the generated example."""

_IMPLIED = frozenset({("rollout_correction", "mode")})
"""Kind and key of settings that follow from a plugin's name."""
_MOOT = {"weights": "weight"}
"""Key of a rollout correction → a word: if the key's value is null, all keys that contain the word have no effect."""
_ROUNDS = 10
"""Rounds of generation in an example of a filter that drops samples, as in DAPO's preset."""
_BASE = "dovetail.sections"
"""Package of the config classes that plugins extend."""
_SHAPES = {
    "dense": "one a sample",
    "ragged": "one a token",
    "either": "one a sample or a token",
    "object": "one a sample",
}


@dataclass(frozen=True)
class ColumnNote:
    """A column that a plugin reads or writes."""

    name: str
    holds: str
    """Dtype and shape of the column, as text."""
    meaning: str


@dataclass(frozen=True)
class Setting:
    """One key of a plugin's config."""

    name: str
    """Dotted path of the key below the plugin's section."""
    type: str
    default: str
    """The default in YAML's flow style; `required` for keys without a default, empty for sections."""
    allowed: str
    doc: str


@dataclass(frozen=True)
class Page:
    """The documentation page of one plugin."""

    kind: str
    name: str
    summary: str
    """One line that describes the plugin."""
    doc: str
    """The docstring: equation, paper, remarks; without the paragraph `In a config:`."""
    papers: tuple[str, ...]
    """arXiv numbers of the papers that the docstring names."""
    requires: tuple[ColumnNote, ...] | None
    """Columns that the plugin reads under the default config; None if the columns depend on the config."""
    provides: tuple[ColumnNote, ...] | None
    capabilities: tuple[str, ...]
    settings: tuple[Setting, ...]
    places: tuple[str, ...]
    """Key paths at which a config selects a plugin of this kind; none for plugins that are always active."""
    example: str
    """Config in YAML that selects the plugin, with its main settings and the keys of other sections that the plugin needs."""
    stands_for: str
    """The settings that a preset makes, as YAML; empty for plugins that are not presets."""
    parts: tuple[tuple[str, str], ...]
    """Kind and name of each plugin that a preset selects; empty for other plugins."""


def page_of(plugin: PluginManifest) -> Page:
    """Return the documentation page of a plugin of any kind."""
    schema = plugin.config_schema or {}
    places = places_of(plugin.kind)
    try:
        doc, beside = doc_and_example(plugin.doc)
    except ValueError:
        doc, beside = plugin.doc, {}
    return Page(
        kind=plugin.kind,
        name=plugin.name,
        summary=_summary(plugin),
        doc=doc,
        papers=tuple(dict.fromkeys(PAPER.findall(plugin.doc))),
        requires=_notes(plugin.requires, plugin),
        provides=_notes(plugin.provides, plugin),
        capabilities=plugin.capabilities,
        settings=tuple(_settings(schema.get("fields", []))),
        places=tuple(format_path(path) for path, _ in places),
        example=_example(plugin, *places[0], beside) if places else "",
        stands_for=plain_yaml.dump(plugin.settings) if plugin.settings else "",
        parts=tuple(_parts(plugin.settings or {})),
    )


def places_of(kind: str) -> list[tuple[KeyPath, str | None]]:
    """Return the key paths at which a config selects plugins of a kind, each with `list`, `dict` or None for a single plugin.

    Paths in the algorithm's section come first; paths of mappings, whose keys the user chooses, come last.
    """
    found = [
        (path, collection) for path, found, collection in _places(RunConfig, ()) if found == kind
    ]
    return sorted(found, key=lambda place: (place[1] == "dict", place[0][0] != "algorithm"))


def doc_and_example(doc: str) -> tuple[str, Mapping[str, Any]]:
    """Return a docstring without its `In a config:` section, and the section's config (empty without such a section).

    Raises:
        ValueError: the section is not a YAML mapping.
    """
    blocks = doc.split("\n\n")
    if IN_A_CONFIG not in blocks:
        return doc, {}
    at = blocks.index(IN_A_CONFIG)
    end = at + 1
    while end < len(blocks) and blocks[end].startswith("    "):
        end += 1
    try:
        config, _ = plain_yaml.parse(textwrap.dedent("\n\n".join(blocks[at + 1 : end])))
    except plain_yaml.YamlTextError as error:
        raise ValueError(
            f"the text below `{IN_A_CONFIG}` in its docstring is not valid YAML: {error}"
        ) from error
    if not isinstance(config, Mapping):
        raise ValueError(  # noqa: TRY004 - a fault of the text's content
            f"the text below `{IN_A_CONFIG}` in its docstring is {config!r}; expected a mapping of config keys: indent the YAML "
            "by four spaces, after an empty line"
        )
    return "\n\n".join(blocks[:at] + blocks[end:]), config


def shown(value: object) -> str:
    """Return a default value in YAML's flow style."""
    return json.dumps(value, ensure_ascii=False)


def _summary(plugin: PluginManifest) -> str:
    """Return the docstring of the plugin's own Config, or else the first sentence of the plugin's docstring."""
    module = plugin.config.partition(":")[0]
    schema = plugin.config_schema or {}
    if schema.get("doc") and module != _BASE:
        return str(schema["doc"])
    paragraph = " ".join(plugin.doc.partition("\n\n")[0].split())
    sentence, stop, _ = paragraph.partition(". ")
    return sentence + stop.strip()


def _places(cls: type, path: KeyPath) -> Iterator[tuple[KeyPath, str, str | None]]:
    for field in fields_of(cls).values():
        where = (*path, field.name)
        if get_origin(field.type) is dict and not field.collection:
            where = (*where, "NAME")
        if field.kind:
            yield where, field.kind, field.collection
        if field.section and not field.collection:
            yield from _places(field.section, where)


def _notes(names: Iterable[str] | None, plugin: PluginManifest) -> tuple[ColumnNote, ...] | None:
    if names is None:
        return None
    own = {str(column.get("name")): column for column in plugin.columns}
    notes = []
    for name in names:
        known = vars(GLOSSARY[name]) if name in GLOSSARY else {}
        column = own.get(name) or known or {"meaning": "no column of that name is known"}
        inner = own.get(name, {}).get("inner")
        each = f", each {sizes_of(*inner)}" if inner else ""
        shape = str(column.get("shape", ""))
        holds = f"{column.get('dtype', '')}, {_SHAPES.get(shape, shape)}{each}".strip(", ")
        notes.append(ColumnNote(name, holds, str(column.get("meaning", ""))))
    return tuple(notes)


def _settings(fields: Iterable[Mapping[str, Any]], above: str = "") -> Iterator[Setting]:
    for field in fields:
        name = f"{above}{field['name']}"
        default = "required" if field.get("required") else shown(field.get("default"))
        if "fields" in field and "default" not in field and not field.get("collection"):
            default = ""
        doc = " ".join(str(field.get("doc") or "").split())
        yield Setting(name, str(field["type"]), default, str(field.get("allowed") or ""), doc)
        below = {"list": "[].", "dict": ".<key>."}.get(str(field.get("collection")), ".")
        yield from _settings(field.get("fields", []), name + below)


def _example(
    plugin: PluginManifest, path: KeyPath, collection: str | None, beside: Mapping[str, Any]
) -> str:
    values = _worth_showing(plugin.kind, _defaults((plugin.config_schema or {}).get("fields", [])))
    section = _held({"name": plugin.name, **values} if values else plugin.name, collection)
    return plain_yaml.dump(_laid_over(_laid_over(_at(path, section), _companions(plugin)), beside))


def _held(entry: object, collection: str | None) -> Any:
    """Return the value of a config key that holds only this entry: a list of it, a mapping from a sample key to it, or the entry itself.

    Args:
        entry: the selection of a plugin: its name, or its section.
        collection: `list`, `dict`, or None if the config key holds a single plugin.
    """
    return {"list": [entry], "dict": {"my_key": entry}}.get(str(collection), entry)


def _worth_showing(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, except those that are null, empty, implied by the name, or without effect."""
    moot = [word for key, word in _MOOT.items() if kind == "rollout_correction" and key in values and values[key] is None]  # fmt: skip
    return {
        key: value
        for key, value in values.items()
        if value not in (None, [], {})
        and (kind, key) not in _IMPLIED
        and not any(word in key for word in moot)
    }


def _companions(plugin: PluginManifest) -> dict[str, Any]:
    """Return a config with the keys of other sections without which the plugin does not work as its page describes."""
    facts = plugin.facts or {}
    if plugin.kind in ("policy_loss", "advantage") and facts.get("aggregation"):
        return _at(("algorithm", "loss_aggregation"), facts["aggregation"])
    if plugin.kind == "sample_filter" and facts.get("action") == "drop":
        return _at(("algorithm", "max_generation_rounds"), _ROUNDS)
    return {}


def _at(path: KeyPath, value: Any) -> dict[str, Any]:
    """Return a config that holds only `value`, at the key path `path`."""
    for key in reversed(path):
        value = {key: value}
    config: dict[str, Any] = value
    return config


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configs: mappings are merged, and for other values `above` takes precedence."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            merged[key] = _laid_over(under, value)
        else:
            merged[key] = value
    return merged


def _defaults(fields: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in fields:
        if "fields" in field and "default" not in field:
            if inner := _defaults(field["fields"]):
                values[field["name"]] = _held(inner, field.get("collection"))
        elif field.get("required"):
            values[field["name"]] = f"<{field['type']}>"
        else:
            values[field["name"]] = field.get("default")
    return values


def _parts(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for path, kind, _ in _places(RunConfig, ()):
        value: Any = settings
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        for section in value if isinstance(value, (list, tuple)) else [value]:
            name = section.get("name") if isinstance(section, Mapping) else section
            if isinstance(name, str):
                yield kind, name
