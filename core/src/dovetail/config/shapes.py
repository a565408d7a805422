"""How a field's type steers the merge: what shape its values have, and what is there before any layer speaks."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs

from dovetail.config.layers import ByIndex, Given, is_mapping
from dovetail.config.schema import Field, is_section, without_none
from dovetail.config.serialise import given_values

Shape = Literal["plugin", "section", "list", "dict", "leaf"]


def always_there(field: Field, default: Any) -> bool:
    """Whether an absent field is built all the same, for the plugins and required keys inside it."""
    inner, optional = without_none(field.type)
    if is_section(inner) and not field.kind:
        return default is not None and not (optional and default is attrs.NOTHING)
    return bool(field.kind) or (field.section is not None and bool(default))


def default_entries(field: Field) -> list[Any]:
    """What an index in an override counts from where no layer gives the list."""
    if field.kind:
        return [{"name": name} for name in (field.plugin_default or "").split()]
    default = field.default()
    if not isinstance(default, (tuple, list)):
        return []
    return [given_values(entry) if is_section(type(entry)) else entry for entry in default]


def shape_of(tp: Any, field: Field, givens: Sequence[Given]) -> Shape:
    """How a value of this type merges; where anything is allowed, as the last layer's value does."""
    origin = typing.get_origin(tp) or tp
    if is_section(tp):
        return "plugin" if field.kind else "section"
    if origin in (tuple, list):
        return "list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "dict"
    if tp is Any and givens and isinstance(givens[-1].value, (list, ByIndex)):
        return "list"
    return "dict" if tp is Any and givens and is_mapping(givens[-1].value) else "leaf"


def element_types(tp: Any) -> Callable[[int], Any]:
    """The type of a list's entry, from its index."""
    args = typing.get_args(tp)
    if typing.get_origin(tp) is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        return lambda index: args[index] if index < len(args) else Any
    return lambda _: args[0] if args else Any
