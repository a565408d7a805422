"""Description of a key of a loaded config: value, origin, type, allowed values, meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from dovetail.config.docs import field_docs
from dovetail.config.keys import ABSENT, KeyPath, format_path, leaves, parse_path, value_at
from dovetail.config.layers import DEFAULT_LAYER
from dovetail.config.load import LoadedConfig
from dovetail.config.plain_yaml import parse
from dovetail.config.problems import show_value
from dovetail.config.schema import Field, bounds, describe, fields_of, is_section
from dovetail.config.serialise import dump_yaml, plain_value, to_mapping
from dovetail.errors import ConfigError, nearest


@attrs.frozen(kw_only=True)
class Explanation:
    """The description of one key of a config."""

    key: str
    value: Any
    """The key's value as plain containers; None for a section."""
    origin: str
    """The layer that gave the value."""
    preset: str
    """The selected preset's value as text, if another layer overrides it; else empty."""
    type: str
    allowed: str
    """Bounds of the value, or the plugins that can be named; empty if the type says enough."""
    default: Any
    """The default value; None for a required key."""
    required: bool
    doc: str
    """The field's docstring."""
    keys: tuple[str, ...] = ()
    """The keys of a section."""


def explain(loaded: LoadedConfig, key: str) -> Explanation:
    """Describe one key: its value, origin, type and meaning.

    Raises:
        ConfigError: the config has no such key; the error names the nearest.
    """
    try:
        path = parse_path(key)
    except ValueError as error:
        raise ConfigError(
            str(error), hint="give a key path such as rollout.n or tracking[0].name"
        ) from None
    value: Any = loaded.config
    owner: type = type(value)
    field: Field | None = None
    holder: Field | None = None
    absent: KeyPath = ()
    for depth, part in enumerate(path):
        # A null optional section's keys are explained from its class.
        null = field.section if value is None and field and not field.kind else None
        if is_section(type(value)) or null:
            owner = null or type(value)
            absent = absent or path[: depth if null else 0]
            holder, field = field, fields_of(owner).get(str(part))
            value = getattr(value, str(part), None)
        else:
            value = (
                value_at(value, (part,)) if isinstance(value, (Mapping, list, tuple)) else ABSENT
            )
        if field is None or value is ABSENT:
            raise _no_such_key(loaded, key)
    assert field is not None
    if field.name != "name" or not (holder and holder.kind):
        holder = None
    section = is_section(type(value))
    below = [origin for _, _, origin in all_keys(loaded, key)]
    origin = loaded.provenance.get(format_path(path)) or ", ".join(dict.fromkeys(below))
    if absent:
        given = format_path(absent)
        origin = f"{loaded.provenance.get(given, DEFAULT_LAYER)}: {given} is null"
    return Explanation(
        key=format_path(path),
        value=None if section else plain_value(value),
        origin=origin or DEFAULT_LAYER,
        preset=_overruled_preset(loaded, path),
        type=_type_of(field, inside=path[-1] != field.name),
        allowed=_allowed(field, holder),
        default=_default_of(field, holder),
        required=field.required,
        doc=field_docs(owner).get(field.name, ""),
        keys=tuple(fields_of(type(value))) if section else (),
    )


def annotated_yaml(loaded: LoadedConfig) -> str:
    """Return the config as `dump_yaml` writes it, with a comment on the origin of each value that is not a default."""
    text = dump_yaml(loaded.config)
    lines = text.split("\n")
    _, numbers = parse(text)
    for path, _ in leaves(to_mapping(loaded.config)):
        origin = loaded.provenance.get(format_path(path), DEFAULT_LAYER)
        if origin != DEFAULT_LAYER:
            lines[numbers[path] - 1] += f"  # {' '.join(origin.split())}"
    return "\n".join(lines)


def all_keys(loaded: LoadedConfig, below: str | None = None) -> Iterator[tuple[str, Any, str]]:
    """Yield every key path, or every one below `below`, with its value and the layer that gave the value."""
    start = parse_path(below) if below else ()
    for path, value in leaves(plain_value(loaded.config)):
        if path[: len(start)] == start:
            key = format_path(path)
            yield key, value, loaded.provenance.get(key, DEFAULT_LAYER)


def _overruled_preset(loaded: LoadedConfig, path: KeyPath) -> str:
    layer = loaded.preset
    if layer is None or loaded.provenance.get(format_path(path)) == layer.name:
        return ""
    given = value_at(layer.tree, path)
    name = (*path[:-1], "name")
    written_for = value_at(layer.tree, name)
    if given is ABSENT or isinstance(given, (Mapping, list)):
        return ""
    if path != name and written_for not in (ABSENT, value_at(to_mapping(loaded.config), name)):
        return ""
    return f"{show_value(given)} ({layer.name})"


def _type_of(field: Field, *, inside: bool) -> str:
    if field.kind is None:
        return describe(field.type)
    plugin = f"a {field.kind} plugin: its name, or its section"
    if field.collection and not inside:
        return f"a {field.collection} whose entries are each {plugin}"
    return plugin


def _allowed(field: Field, holder: Field | None) -> str:
    """Return a number's bounds, or the names of the installed plugins if the key selects a plugin.

    Args:
        field: the field of the key.
        holder: the field of the section around the key, if the key is the `name` in a plugin's section; else None.
    """
    plugin = holder or field
    if plugin.kind is None:
        return bounds(field.attribute)
    from dovetail.plugins.index import default_index

    names = [entry.name for entry in default_index().entries(plugin.kind) if entry.usable]
    return ", ".join(dict.fromkeys(names))


def _default_of(field: Field, holder: Field | None) -> Any:
    """Return a key's default; for a plugin's name, the plugin that is selected by default. `holder` is as in `_allowed`."""
    plugin = holder or field
    if plugin.kind and not plugin.collection:
        return plugin.plugin_default
    if field.kind:
        return (field.plugin_default or "").split()
    default = field.default()
    return None if default is attrs.NOTHING else plain_value(default)


def _no_such_key(loaded: LoadedConfig, key: str) -> ConfigError:
    paths = [path for path, _ in leaves(plain_value(loaded.config))]
    known = dict.fromkeys(format_path(path[:end]) for path in paths for end in range(1, len(path) + 1))  # fmt: skip
    last = key.rpartition(".")[2]
    close = [name for name in known if name.rpartition(".")[2] == last]
    close = close or [name for name in [nearest(key, known)] if name]
    listing = "`dovetail config explain CONFIG` lists all keys"
    hint = f"did you mean {' or '.join(close)}?" if close else listing
    return ConfigError(f"the config has no key {key!r}", hint=hint)
