"""Configs as plain containers and as YAML, in the form that a run directory keeps and that loads as the same config."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.config.keys import GIVEN, KeyPath, value_at
from dovetail.config.plain_yaml import dump
from dovetail.config.schema import fields_of, is_section
from dovetail.sections.fields import SELECTORS, PluginSection


def to_mapping(config: object) -> dict[str, Any]:
    """Return a config, or one section, as nested dicts, lists and scalars, defaults included.

    `config_from_mapping(to_mapping(config)).config == config`. Literal `${` is escaped in interpolated fields, so that it stays literal.
    """
    mapping: dict[str, Any] = {}
    for name, field in fields_of(type(config)).items():
        value = getattr(config, name)
        if value is None and name in SELECTORS and isinstance(config, PluginSection):
            continue
        mapping[name] = plain_value(value, verbatim=field.verbatim)
    return mapping


def dump_yaml(
    config: object,
    from_environment: Mapping[KeyPath, tuple[str, Any]] | None = None,
    given: Sequence[str] = (),
) -> str:
    """Return a config, or one section, as YAML text, defaults included.

    Args:
        config: a config or a section.
        from_environment: the values that contain an environment variable, as in `LoadedConfig`: key path → (text, resolved value). The
            text, such as `${oc.env:KEY}`, is written in place of the value, which may be secret.
        given: the key paths that files and overrides give. The text lists them; all other values are derived again when the text is read.
    """
    mapping = to_mapping(config)
    for path, (written, value) in (from_environment or {}).items():
        holder = value_at(mapping, path[:-1])
        there: Any = config
        for key in path:
            there = getattr(there, str(key)) if is_section(type(there)) else there[key]
        added = given_values(there).keys() - value.keys() if isinstance(value, Mapping) else ()
        # keep the `${…}` only if no later layer gave another value
        if not added and _holds(value_at(mapping, path), plain_value(value)):
            holder[path[-1]] = written
    return dump(mapping | ({GIVEN: list(given)} if given else {}))


def _holds(mapping: object, value: object) -> bool:
    """Return whether `mapping`, a value in the config, equals `value`. At any level, `mapping` may have further keys, with any values."""
    if isinstance(mapping, dict) and isinstance(value, dict):
        return all(key in mapping and _holds(mapping[key], value[key]) for key in value)
    return mapping == value


def given_values(default: object) -> dict[str, Any]:
    """Return the entries that a field's default value sets explicitly, as plain containers.

    For a section, these are the entries that differ from the defaults of the section's class; for a mapping, all entries. Empty if the
    field's default is a scalar or a list.
    """
    if isinstance(default, Mapping):
        return {key: plain_value(value) for key, value in default.items()}
    if not is_section(type(default)):
        return {}
    mapping = to_mapping(default)
    return {
        name: mapping[name]
        for name, field in fields_of(type(default)).items()
        if name in mapping and getattr(default, name) != field.default()
    }


def plain_value(value: object, *, verbatim: bool = False) -> Any:
    """Return a value of a config as nested dicts, lists and scalars.

    Args:
        value: a section, a mapping, a list or a scalar.
        verbatim: whether to leave `${` in strings as it is, instead of escaping it; sections are always escaped.
    """
    if is_section(type(value)):
        return to_mapping(value)
    if isinstance(value, Mapping):
        return {str(key): plain_value(child, verbatim=verbatim) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(child, verbatim=verbatim) for child in value]
    if isinstance(value, Path):
        value = str(value)
    return escaped(value) if isinstance(value, str) and not verbatim else value


def escaped(text: str) -> str:
    """Return the text with `${` escaped, so that interpolation restores the text."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
