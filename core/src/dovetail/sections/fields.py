"""Parts of config sections: fields that select plugins, their metadata, and the base of every plugin's config."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeAlias

import attrs

PLUGIN_KIND = "dovetail.plugin_kind"
"""Metadata key: the kind of the plugins whose sections the field holds."""
PLUGIN_DEFAULT = "dovetail.plugin_default"
"""Metadata key: the plugin that an absent section selects; None means no plugin."""
COLLECTION = "dovetail.collection"
"""Metadata key: `list` or `dict` if the field holds several plugin sections."""
SELECTORS = ("name", "path", "attribute")
"""The keys of a plugin's section that select the plugin."""
VERBATIM = "dovetail.verbatim"
"""Metadata key: the value is never interpolated (prompts, templates, patterns)."""
ONE_OR_MANY = "dovetail.one_or_many"
"""Metadata key: a bare string stands for a list of one."""

Validator: TypeAlias = Any
"""One or more attrs validators, for a field of any type; attrs' own types fit one field type only."""
COUNT: Validator = (attrs.validators.ge(1), attrs.validators.le(2**20))
"""Validators of a count of prompts, samples, passes or replicas, up to 2^20."""
TOKENS: Validator = (attrs.validators.ge(1), attrs.validators.le(2**24))
"""Validators of a length in tokens, up to 2^24."""
AT_LEAST_ONE: Validator = attrs.validators.optional(attrs.validators.ge(1))
"""Validator of a count that may be absent."""
ABOVE_ZERO: Validator = attrs.validators.optional(attrs.validators.gt(0))
"""Validator of a positive number that may be absent."""
NOT_NEGATIVE: Validator = attrs.validators.optional(attrs.validators.ge(0))
"""Validator of a number of 0 or more that may be absent."""


def _json_values(_section: object, attribute: attrs.Attribute[Any], value: object) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{attribute.name} has a value that JSON can't represent: {error}"
        ) from error


JSON_VALUES: Validator = _json_values
"""Validator of a mapping of JSON values."""


def plugin_field(
    kind: str,
    default: str | None,
    *,
    collection: Literal["list", "dict"] | None = None,
    factory: Callable[[], PluginSection] | None = None,
) -> Any:
    """Return an attrs field for a plugin's section, which loads as the Config class of the plugin that `name` selects.

    Args:
        kind: the kind of the plugin.
        default: the name of the plugin if none is selected; for a list, names separated by spaces; None for no plugin.
        collection: `list` or `dict` if the field holds several plugins.
        factory: the function that makes the default section, an instance of the kind's base class. Values of this section take
            precedence over the defaults of the plugin's Config.
    """
    factories: dict[str | None, Any] = {
        "list": lambda: tuple(PluginSection(name=name) for name in (default or "").split()),
        "dict": dict,
    }
    metadata = {PLUGIN_KIND: kind, PLUGIN_DEFAULT: default, COLLECTION: collection}
    made = factory or factories.get(collection)
    if made is not None:
        return attrs.field(factory=made, metadata=metadata)
    return attrs.field(default=None, metadata=metadata)


@attrs.frozen(kw_only=True)
class PluginSection:
    """Base of every plugin's config; it selects the plugin, by name or by file."""

    unsupported_keys: ClassVar[Mapping[str, str]] = {}
    """Keys that this plugin lacks but that other plugins of its kind, or the engine that it wraps (such as vLLM), have. Each key has the
    text of an error: `{"mode": "its replicas are always servers: leave it out"}`."""

    name: str | None = None
    """Name of an installed plugin; `name@distribution` if several distributions have a plugin of this name."""
    path: str | None = None
    """A Python file that holds the plugin, in place of a package."""
    attribute: str | None = None
    """The plugin's class or function in the file `path`."""


@attrs.frozen(kw_only=True)
class PresetSection(PluginSection):
    """Base of every preset's config."""

    def settings(self) -> Mapping[str, Any]:
        """Return the settings of the preset, as plain containers; values may refer to any key by `${key.path}`."""
        return {}


def own_fields(config: PluginSection) -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields that a plugin adds to its section: name, value and default (`attrs.NOTHING` if there is none)."""
    for field in attrs.fields(type(config)):
        if field.name not in attrs.fields_dict(PluginSection):
            default: Any = field.default
            if isinstance(default, attrs.Factory) and not default.takes_self:  # type: ignore[arg-type]
                default = default.factory()
            yield field.name, getattr(config, field.name), default
