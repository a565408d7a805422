"""Conversion of the merged tree to frozen attrs classes by cattrs: strict types, no unknown keys, all errors at once."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
from cattrs import Converter
from cattrs.errors import (
    AttributeValidationNote,
    BaseValidationError,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn, override

from dovetail.config.keys import KeyPath
from dovetail.config.layers import is_mapping
from dovetail.config.merge import SectionDict
from dovetail.config.mismatch import MismatchError, fits_float32, mismatch
from dovetail.config.schema import (
    Field,
    describe,
    entry_type,
    fields_of,
    is_section,
    is_union,
    without_none,
)

Hook = Callable[[Any, Any], Any]


@attrs.frozen
class StructureFault:
    """An exception that building a config raised, and the key path where it was raised."""

    path: KeyPath
    error: Exception


def structure(tree: SectionDict) -> tuple[Any, list[StructureFault]]:
    """Build the config that a merged tree describes.

    Returns:
        The config and no faults, or None and every fault found.
    """
    try:
        return _converter().structure(tree, tree.cls), []
    except BaseValidationError as group:
        return None, list(_faults(group, ()))


@functools.cache
def _converter() -> Converter:
    # Cached: cattrs compiles a function for every section class that it meets, a millisecond each.
    converter = Converter(forbid_extra_keys=True, detailed_validation=True)
    for scalar in (bool, int, float, str, Path):
        converter.register_structure_hook(scalar, _scalar)
    converter.register_structure_hook_func(lambda tp: tp is Any, lambda value, _: value)
    converter.register_structure_hook_func(_is_literal, _literal)
    converter.register_structure_hook_factory(_is_plain_union, _union_hook)
    converter.register_structure_hook_factory(_is_container, _container_hook)
    converter.register_structure_hook_factory(is_section, _section_hook)
    return converter


def _scalar(value: Any, tp: Any) -> Any:
    """Check that a value has exactly the type `tp`, except that an int may stand for a float. Floats must be finite in float32."""
    if tp is float and type(value) in (int, float) and fits_float32(value):
        return float(value)
    if tp is float or type(value) is not (str if tp is Path else tp):
        raise mismatch(value, tp)
    return Path(value) if tp is Path else value


def _is_literal(tp: object) -> bool:
    return typing.get_origin(tp) is Literal


def _literal(value: object, tp: object) -> Any:
    if (type(value), value) not in [(type(allowed), allowed) for allowed in typing.get_args(tp)]:
        raise mismatch(value, tp)
    return value


def _is_plain_union(tp: object) -> bool:
    """Return whether a type is a union of scalars, such as `int | None`; cattrs itself handles `Section | None` and `list[int] | None`."""
    inner, _ = without_none(tp)
    nested = is_section(inner) or typing.get_origin(inner) not in (None, Literal)
    return is_union(tp) and (is_union(inner) or not nested)


def _union_hook(tp: object, converter: Converter) -> Hook:
    members = sorted(typing.get_args(tp), key=lambda member: member is float)

    def hook(value: object, _: object) -> Any:
        if value is None and type(None) in members:
            return None
        for member in members:
            if member is type(None):
                continue
            try:
                return converter.structure(value, member)
            except (MismatchError, BaseValidationError):
                continue
        raise mismatch(value, tp)

    return hook


def _is_container(tp: object) -> bool:
    container = typing.get_origin(tp) or tp
    return isinstance(container, type) and issubclass(container, (tuple, list, Mapping))


def _container_hook(tp: Any, converter: Converter) -> Hook:
    """Return a hook that structures every entry of a list or mapping, and raises all errors together, each with its index or key."""
    container, args = typing.get_origin(tp) or tp, typing.get_args(tp)
    keyed = issubclass(container, Mapping)
    fixed = container is tuple and bool(args) and args[-1] is not Ellipsis

    def hook(value: Any, _: Any) -> Any:
        if not (is_mapping(value) if keyed else isinstance(value, (list, tuple))):
            raise mismatch(value, tp)
        if fixed and len(value) != len(args):
            raise MismatchError(f"expected {len(args)} values ({describe(tp)}), got {len(value)}")
        done: dict[Any, Any] = {}
        errors: list[Exception] = []
        for index, (key, entry) in enumerate(value.items() if keyed else enumerate(value)):
            try:
                done[key] = converter.structure(entry, entry_type(tp, index))
            except Exception as error:  # noqa: BLE001 - raised again below, with all the others
                error.add_note(IterableValidationNote(f"at {key!r}", key, tp))
                errors.append(error)
        if errors:
            raise IterableValidationError(f"while structuring {tp}", errors, tp)
        return done if keyed else container(done.values())

    return hook


def _section_hook(declared: Any, converter: Converter) -> Hook:
    """Return a hook that structures a section into the class that the merge chose (else `declared`), with validators run for each field."""
    made: dict[type, Hook] = {}

    def make(cls: type) -> Hook:
        overrides = {
            name: override(struct_hook=_field_hook(field, converter))
            for name, field in fields_of(cls).items()
        }
        return make_dict_structure_fn(cls, converter, **overrides)  # type: ignore[arg-type]

    def hook(value: Any, _: Any) -> Any:
        cls = value.cls if isinstance(value, SectionDict) else declared
        if not is_mapping(value):
            raise mismatch(value, cls)
        if cls not in made:
            made[cls] = make(cls)
        return made[cls](value, cls)

    return hook


def _field_hook(field: Field, converter: Converter) -> Hook:
    # attrs stops at a class's first failing validator. attrs' own validators need no instance, and run here for each field.
    stock = _stock_parts(field.attribute.validator)

    def hook(value: object, _: object) -> Any:
        structured = converter.structure(value, field.type)
        for part in stock:
            part(None, field.attribute, structured)
        return structured

    return hook


def _stock_parts(validator: object) -> list[Any]:
    """Return the validators from `attrs.validators` among those that a field combines; these, unlike a plugin's own, need no instance."""
    if together := getattr(validator, "_validators", None):
        return [part for each in together for part in _stock_parts(each)]
    return [validator] if type(validator).__module__ == "attr.validators" else []


def _faults(error: Exception, path: KeyPath) -> Iterator[StructureFault]:
    if not isinstance(error, BaseValidationError):
        yield StructureFault(path, error)
        return
    for inner in error.exceptions:
        keys = [
            note.name if isinstance(note, AttributeValidationNote) else note.index
            for note in getattr(inner, "__notes__", ())
            if isinstance(note, (AttributeValidationNote, IterableValidationNote))
        ]
        yield from _faults(inner, (*path, *keys[:1]))
