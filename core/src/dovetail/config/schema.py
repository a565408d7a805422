"""Fields of section classes with resolved types, and types as text."""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from dovetail.sections import ONE_OR_MANY, VERBATIM
from dovetail.sections.fields import COLLECTION, PLUGIN_DEFAULT, PLUGIN_KIND


@attrs.frozen
class Field:
    """One field of the class of a config section."""

    name: str
    type: Any
    """The annotation, resolved."""
    attribute: attrs.Attribute[Any]
    kind: str | None
    """Plugin kind, if the field holds one or more plugin sections; else None."""
    plugin_default: str | None
    """Name of the plugin that is selected if no layer selects one. For a list of plugins: the names, separated by spaces."""
    collection: str | None
    """`list` or `dict` if the field holds several plugin sections; else None."""
    verbatim: bool
    """Whether the field's strings are kept as written, without resolving `${…}`."""
    one_or_many: bool
    """Whether a config may give a list of one string as the string alone."""

    @property
    def required(self) -> bool:
        """Whether a config must give a value."""
        return self.attribute.default is attrs.NOTHING

    @functools.cached_property
    def section(self) -> type | None:
        """The section class that the field holds; for a plugin, the base class of the plugin's kind."""
        return section_class(self.type)

    def default(self) -> Any:
        """Return the default value, or attrs.NOTHING."""
        default: Any = self.attribute.default
        if not isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            return default
        return attrs.NOTHING if default.takes_self else default.factory()


def fields_of(cls: type) -> Mapping[str, Field]:
    """Return the fields of a section class that a config can set, by name, inherited fields first."""
    return _fields_of(cls)


@functools.cache
def _fields_of(cls: Any) -> Mapping[str, Field]:
    attrs.resolve_types(cls, include_extras=False)
    return types.MappingProxyType({a.name: _field(a) for a in attrs.fields(cls) if a.init})


def _field(attribute: attrs.Attribute[Any]) -> Field:
    metadata = attribute.metadata
    return Field(
        attribute.name,
        attribute.type,
        attribute,
        kind=metadata.get(PLUGIN_KIND),
        plugin_default=metadata.get(PLUGIN_DEFAULT),
        collection=metadata.get(COLLECTION),
        verbatim=bool(metadata.get(VERBATIM)),
        one_or_many=bool(metadata.get(ONE_OR_MANY)),
    )


def is_section(tp: object) -> bool:
    """Return whether a type is the class of a config section."""
    return isinstance(tp, type) and attrs.has(tp)


def section_class(tp: Any) -> type | None:
    """Return the class of a config section in `X`, `X | None`, `tuple[X, ...]`, `list[X]` or `dict[str, X]`; None if there is none."""
    if is_section(tp):
        section: type = tp
        return section
    return next((found for arg in typing.get_args(tp) if (found := section_class(arg))), None)


def is_union(tp: object) -> bool:
    """Return whether a type is `X | Y` or `Optional[X]`."""
    return typing.get_origin(tp) in (typing.Union, types.UnionType)


def without_none(tp: object) -> tuple[Any, bool]:
    """Return `X | None` as (X, True); any other type as (type, False)."""
    if not is_union(tp):
        return tp, False
    args = [arg for arg in typing.get_args(tp) if arg is not type(None)]
    optional = len(args) < len(typing.get_args(tp))
    return (args[0], optional) if len(args) == 1 else (tp, optional)


def entry_type(tp: object, index: int = 0) -> Any:
    """Return the type of a list's or tuple's entry at `index`, or of the values of a mapping."""
    args = typing.get_args(tp)
    if not args:
        return Any
    if len(args) == 2 and typing.get_origin(tp) not in (tuple, list):
        return args[1]
    if typing.get_origin(tp) is tuple and args[-1] is not Ellipsis:
        return args[index] if index < len(args) else Any
    return args[0]


def describe(tp: Any) -> str:
    """Return a type as text: `int`, `one of "a", "b"`, `a list of str`, `int or null`."""
    if tp is type(None) or tp is None:
        return "null"
    if tp is Any or tp is object:
        return "anything"
    if is_union(tp):
        return " or ".join(describe(arg) for arg in typing.get_args(tp))
    if typing.get_origin(tp) is Literal:
        return "one of " + ", ".join(_show(value) for value in typing.get_args(tp))
    if typing.get_args(tp):
        return _describe_container(typing.get_origin(tp), typing.get_args(tp))
    if is_section(tp):
        return "a mapping of " + ", ".join(fields_of(tp))
    return "str" if tp is Path else getattr(tp, "__name__", str(tp))


def _describe_container(origin: object, args: tuple[Any, ...]) -> str:
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping, each value {describe(args[-1])}"
    if origin is tuple and args[-1] is not Ellipsis:
        return "a list of " + " and ".join(describe(arg) for arg in args)
    entry = describe(args[0])
    return f"a list, each entry {entry}" if is_section(args[0]) else f"a list of {entry}"


def bounds(attribute: attrs.Attribute[Any]) -> str:
    """Return what the field's validators allow, such as `> 0, <= 1`; empty if there is no short form."""
    text = repr(attribute.validator) if attribute.validator else ""
    return ", ".join(
        f"{operator} {bound}"
        for operator, bound in re.findall(r"[Vv]alidator for x (>=|<=|>|<) ([^>]+)>", text)
    )


def _show(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
