"""The schema of a Config class: its fields with types, defaults and the docstrings written below them."""

from __future__ import annotations

import typing
from typing import Any

import attrs

from dovetail.config.docs import field_docs
from dovetail.config.schema import (
    Field,
    bounds,
    describe,
    fields_of,
    is_section,
    without_none,
)
from dovetail.config.serialise import plain_value
from dovetail.errors import PluginError
from dovetail.sections import PluginSection


def config_schema(config: type[PluginSection]) -> dict[str, Any]:
    """Return the schema of a Config class, `{"doc", "fields"}`, without the fields that select a plugin (`name`, `path`, `attribute`).

    Raises:
        PluginError: a field has no docstring.
    """
    doc = (config.__doc__ or "").strip().splitlines()
    return {"doc": doc[0] if doc else "", "fields": _fields(config)}


def _fields(cls: type) -> list[dict[str, Any]]:
    selecting = {field.name for field in attrs.fields(PluginSection)}
    docs = field_docs(cls)
    described = []
    for name, field in fields_of(cls).items():
        if name in selecting and issubclass(cls, PluginSection):
            continue
        doc = docs.get(name)
        if not doc:
            raise PluginError(
                f"the field {name!r} of {cls.__module__}.{cls.__qualname__} has no docstring",
                hint="write one as a string on the line below the field: `config explain` and the docs show it",
            )
        described.append(_field(field, doc))
    return described


def _field(field: Field, doc: str) -> dict[str, Any]:
    if field.kind is not None:
        kind = f"{field.kind} plugin"
        described: dict[str, Any] = {"name": field.name, "type": kind, "plugin": field.kind}
        if field.collection is not None:
            described["type"] = f"a {field.collection} of {kind}s"
        return {**described, "default": field.plugin_default, "doc": doc}
    described = {"name": field.name, "type": describe(field.type), "doc": doc}
    single, optional = without_none(field.type)
    if field.section is not None:
        described["type"] = field.section.__name__ + (" or null" if optional else "")
        if not is_section(single):
            collection = "list" if typing.get_origin(single) in (list, tuple) else "dict"
            described["type"] = f"a {collection} of {field.section.__name__}"
            described["collection"] = collection
        described["fields"] = _fields(field.section)
    if allowed := bounds(field.attribute):
        described["allowed"] = allowed
    if field.required:
        described["required"] = True
    elif field.section is None or not is_section(field.type):
        described["default"] = plain_value(field.default(), verbatim=True)
    return described
