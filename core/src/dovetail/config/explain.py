"""What a key of a loaded config is: its value, where that came from, its type, what is allowed, what it means."""

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
    """One key."""

    key: str
    value: Any
    """As plain containers; a section's is None."""
    origin: str
    """The layer that gave the value."""
    preset: str
    """What the selected preset gives for a key where another layer wins over it; empty elsewhere."""
    type: str
    allowed: str
    """Bounds, or the plugins that can be named; empty where the type says all."""
    default: Any
    """The value where no layer gives one; None where there has to be one."""
    required: bool
    doc: str
    """The field's docstring."""
    keys: tuple[str, ...] = ()
    """The keys of a section."""


def explain(loaded: LoadedConfig, key: str) -> Explanation:
    """Explain one key path.

    Raises:
        ConfigError: the config has no such key; names the nearest.
    """
    try:
        path = parse_path(key)
    except ValueError as error:
        raise ConfigError(
            str(error), hint="write for example rollout.n or tracking[0].name"
        ) from None
    value: Any = loaded.config
    owner: type = type(value)
    field: Field | None = None
    absent: KeyPath = ()
    for depth, part in enumerate(path):
        inner = _absent_section(value, field)
        if is_section(type(value)) or inner is not None:
            owner = inner or type(value)
            absent = absent or path[: depth if inner else 0]
            field = fields_of(owner).get(str(part))
            if field is None:
                raise _no_such_key(loaded, key)
            value = getattr(value, field.name, None)
        else:
            value = _entry(loaded, key, value, part)
            field = field if depth else None
    assert field is not None
    explained = _explained(loaded, path, value, owner, field)
    if absent:
        origin = f"{loaded.provenance.get(format_path(absent), DEFAULT_LAYER)}: {format_path(absent)} is null"
        return attrs.evolve(explained, origin=origin)
    return explained


def annotated_yaml(loaded: LoadedConfig) -> str:
    """The config as `dump_yaml` writes it, with the origin of each value that is no default as a comment behind it."""
    text = dump_yaml(loaded.config)
    lines = text.split("\n")
    _, numbers = parse(text)
    for path, _ in leaves(to_mapping(loaded.config)):
        origin = loaded.provenance.get(format_path(path), DEFAULT_LAYER)
        if origin != DEFAULT_LAYER:
            lines[numbers[path] - 1] += f"  # {' '.join(origin.split())}"
    return "\n".join(lines)


def _absent_section(value: Any, field: Field | None) -> type | None:
    """The class of an optional section that is null: its keys can be explained all the same."""
    if value is None and field is not None and field.kind is None:
        return field.section
    return None


def all_keys(loaded: LoadedConfig, below: str | None = None) -> Iterator[tuple[str, Any, str]]:
    """Every key path, or those below one, with its value and the layer that it came from."""
    start = parse_path(below) if below else ()
    for path, value in leaves(plain_value(loaded.config)):
        if path[: len(start)] == start:
            key = format_path(path)
            yield key, value, loaded.provenance.get(key, DEFAULT_LAYER)


def _explained(
    loaded: LoadedConfig, path: KeyPath, value: Any, owner: type, field: Field
) -> Explanation:
    key = format_path(path)
    section = is_section(type(value))
    inside = path[-1] != field.name
    return Explanation(
        key=key,
        value=None if section else plain_value(value),
        origin=loaded.provenance.get(key) or _origins_below(loaded, path),
        preset=_overruled_preset(loaded, path),
        type=_type_of(field, inside=inside),
        allowed=_allowed(loaded, path, field),
        default=_default_of(loaded, path, field),
        required=field.required,
        doc=field_docs(owner).get(field.name, ""),
        keys=tuple(fields_of(type(value))) if section else (),
    )


def _overruled_preset(loaded: LoadedConfig, path: KeyPath) -> str:
    layer = loaded.preset
    if layer is None or loaded.provenance.get(format_path(path)) == layer.name:
        return ""
    given = value_at(layer.tree, path)
    written_for = value_at(layer.tree, (*path[:-1], "name"))
    if given is ABSENT or isinstance(given, (Mapping, list)):
        return ""
    if path[-1] != "name" and written_for not in (ABSENT, _chosen_plugin(loaded, path)):
        return ""
    return f"{show_value(given)} ({layer.name})"


def _chosen_plugin(loaded: LoadedConfig, path: KeyPath) -> Any:
    """The name in the section that holds a key."""
    return value_at(to_mapping(loaded.config), (*path[:-1], "name"))


def _origins_below(loaded: LoadedConfig, path: KeyPath) -> str:
    """The layers that the parts of a container came from, each once."""
    origins = [origin for _, _, origin in all_keys(loaded, format_path(path))]
    return ", ".join(dict.fromkeys(origins)) or DEFAULT_LAYER


def _type_of(field: Field, *, inside: bool) -> str:
    if field.kind is None:
        return describe(field.type)
    plugin = f"a {field.kind} plugin: its name, or its section"
    if field.collection and not inside:
        return f"a {field.collection} whose entries are each {plugin}"
    return plugin


def _allowed(loaded: LoadedConfig, path: KeyPath, field: Field) -> str:
    """Bounds of a number, or the installed plugins where the key names one."""
    plugin = field if field.kind else _plugin_above(loaded, path) if field.name == "name" else None
    if plugin is None:
        return bounds(field.attribute)
    from dovetail.plugins.index import default_index

    names = [entry.name for entry in default_index().entries(plugin.kind) if entry.usable]
    return ", ".join(dict.fromkeys(names))


def _plugin_above(loaded: LoadedConfig, path: KeyPath) -> Field | None:
    """The field whose plugin section holds the key; None where no plugin's does."""
    value: Any = loaded.config
    field: Field | None = None
    for part in path[:-1]:
        if is_section(type(value)):
            field = fields_of(type(value))[str(part)]
            value = getattr(value, field.name)
        else:
            value = value[part]
    return field if field and field.kind else None


def _default_of(loaded: LoadedConfig, path: KeyPath, field: Field) -> Any:
    """What a key is where no layer gives it; for a plugin's name, the plugin that is then selected."""
    plugin = _plugin_above(loaded, path) if field.name == "name" else field if field.kind else None
    if plugin is not None and not plugin.collection:
        return plugin.plugin_default
    if plugin is not None and plugin is field:
        return (plugin.plugin_default or "").split()
    default = field.default()
    return None if default is attrs.NOTHING else plain_value(default)


def _entry(loaded: LoadedConfig, key: str, value: Any, part: str | int) -> Any:
    if (isinstance(value, Mapping) and part in value) or (
        isinstance(value, (list, tuple)) and isinstance(part, int) and part < len(value)
    ):
        return value[part]  # type: ignore[index]
    raise _no_such_key(loaded, key)


def _no_such_key(loaded: LoadedConfig, key: str) -> ConfigError:
    known = [format_path(path) for path in _paths(loaded.config)]
    last = key.rpartition(".")[2]
    close = [name for name in known if name.rpartition(".")[2] == last] or [
        name for name in [nearest(key, known)] if name
    ]
    return ConfigError(
        f"the config has no key {key!r}",
        hint=f"did you mean {' or '.join(close)}?"
        if close
        else "`dovetail config explain CONFIG` lists all",
    )


def _paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key path of a config, those of sections included."""
    if path:
        yield path
    if is_section(type(value)):
        for name in fields_of(type(value)):
            yield from _paths(getattr(value, name), (*path, name))
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _paths(child, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from _paths(child, (*path, index))
