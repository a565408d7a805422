"""Reads the config of a model from its files, and applies the overrides of the run's config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from dovetail.errors import ConfigError, nearest
from dovetail.sections import ModelSection

_ROPE_KEYS = ("rope_theta", "rope_scaling")
"""Keys that transformers moves to `rope_parameters` when it reads a config file."""


def read_config(section: ModelSection, **options: Any) -> Any:
    """Read a model's config in transformers' form, with `override_config` applied.

    Args:
        section: the section of the model.
        options: further arguments of `AutoConfig.from_pretrained`, whose exceptions are raised as they are.

    Raises:
        ConfigError: the architecture lacks an overridden key, or ignores the value.
    """
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(
        str(Path(section.path).expanduser()),
        revision=section.revision,
        trust_remote_code=section.trust_remote_code,
        **options,
    )
    if not section.override_config:
        return found
    values = found.to_dict()
    _apply(found, values, section.override_config)
    made = type(found).from_dict(values)
    _refuse_ignored(made.to_dict(), values, section.override_config)
    return made


def overrides_for_engine(section: ModelSection) -> dict[str, Any]:
    """Return the overridden values under the names that transformers' config object uses.

    Engines set the values on that object, where older names such as `rope_scaling` would have no effect.

    Raises:
        ConfigError: see `read_config`.
    """
    if not section.override_config:
        return {}
    plain = read_config(attrs.evolve(section, override_config={}))
    return dict(_changes(plain.to_dict(), read_config(section).to_dict()))


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in after.items():
        if value != before.get(key):
            part = isinstance(value, Mapping) and "model_type" in value
            yield key, dict(_changes(before[key], value)) if part else value


def _apply(
    config: Any, values: dict[str, Any], overrides: Mapping[str, Any], prefix: str = ""
) -> None:
    """Apply overrides, in place, to the values of a config or of one of its sub-configs.

    Args:
        config: the config or sub-config, for its names.
        values: its values, which are changed.
        overrides: the new values by key.
        prefix: the path of the sub-config for errors, such as `text_config.`.
    """
    own_names = config.attribute_map
    for key, value in overrides.items():
        name = own_names.get(key, key)
        if key in _ROPE_KEYS and "rope_parameters" in values:
            scaling = value if isinstance(value, Mapping) else {key: value}
            values["rope_parameters"] = {**(values["rope_parameters"] or {}), **scaling}
        elif name not in values:
            raise _unknown(config, values, prefix, key)
        elif isinstance(values[name], dict) and isinstance(value, Mapping):
            if name in config.sub_configs:
                _apply(getattr(config, name), values[name], value, f"{prefix}{key}.")
            else:
                values[name].update(value)
        else:
            values[name] = value


def _unknown(config: Any, values: Mapping[str, Any], prefix: str, key: str) -> ConfigError:
    known = [name for name in (*values, *config.attribute_map) if not name.startswith("_")]
    near = nearest(key, known)
    parts = [name for name in config.sub_configs if key in values.get(name, {})]
    if key in attrs.fields_dict(ModelSection):
        hint = f"set model.{key}"
    elif parts:
        hint = f"did you mean {prefix}{parts[-1]}.{key}?"
    else:
        hint = f"did you mean {prefix}{near}?" if near else "leave this key out"
    return ConfigError(
        f"override_config.{prefix}{key}: the architecture {config.model_type!r} has no key {key!r}",
        hint=hint,
    )


def _refuse_ignored(
    made: Mapping[str, Any], asked: Mapping[str, Any], overrides: Mapping[str, Any]
) -> None:
    """Refuse overrides that the config class replaced by values of its own.

    Args:
        made: the values of the config that was constructed.
        asked: the values from which it was constructed, overrides included.
        overrides: the overrides, by key.

    Raises:
        ConfigError: the class ignores an override; the error names the first.
    """
    for key in overrides:
        name = key if key in asked else "rope_parameters"
        if isinstance(asked.get(name), Mapping) or made.get(name) == asked.get(name):
            continue
        raise ConfigError(
            f"override_config.{key}={asked[name]!r}: the architecture {made['model_type']!r} ignores this value and uses {made[name]!r}",
            hint=f"set model.{key}"
            if key in attrs.fields_dict(ModelSection)
            else "leave this key out",
        )
