"""The merged tree becomes frozen attrs classes through cattrs: strict types, unknown keys refused, all errors at once."""

from __future__ import annotations

import enum
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
from dovetail.config.mismatch import MismatchError, mismatch
from dovetail.config.schema import Field, describe, fields_of, is_section, is_union, without_none

Hook = Callable[[Any, Any], Any]


@attrs.frozen
class Fault:
    """An exception at a key path, before it is put into words."""

    path: KeyPath
    error: Exception


def structure(tree: SectionDict) -> tuple[Any, list[Fault]]:
    """Build the config class of a merged tree.

    Returns:
        The config and no faults, or None and every fault found.
    """
    try:
        return _converter().structure(tree, tree.cls), []
    except BaseValidationError as group:
        return None, list(_faults(group, ()))


def _converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=True)
    for scalar in (bool, int, float, str, Path):
        converter.register_structure_hook(scalar, _scalar)
    converter.register_structure_hook_func(lambda tp: tp is Any, lambda value, _: value)
    converter.register_structure_hook_func(
        lambda tp: isinstance(tp, type) and issubclass(tp, enum.Enum), _enum
    )
    converter.register_structure_hook_func(_is_literal, _literal)
    converter.register_structure_hook_factory(_is_plain_union, _union_hook)
    converter.register_structure_hook_factory(_is_sequence, _sequence_hook)
    converter.register_structure_hook_factory(_is_dict, _dict_hook)
    converter.register_structure_hook_factory(is_section, _section_hook)
    return converter


def _scalar(value: Any, tp: Any) -> Any:
    """Exactly the type: no text for a number, no True for 1; an int is a float, too."""
    if tp is float and type(value) is int:
        return float(value)
    if type(value) is not (str if tp is Path else tp):
        raise mismatch(value, tp)
    return Path(value) if tp is Path else value


def _is_literal(tp: Any) -> bool:
    return typing.get_origin(tp) is Literal


def _literal(value: Any, tp: Any) -> Any:
    if not any(
        type(value) is type(allowed) and value == allowed for allowed in typing.get_args(tp)
    ):
        raise mismatch(value, tp)
    return value


def _enum(value: Any, tp: Any) -> Any:
    for member in tp:
        if type(value) is type(member.value) and value == member.value:
            return member
    raise mismatch(value, tp)


def _is_plain_union(tp: Any) -> bool:
    """`int | None` or `int | str`; cattrs itself does `Section | None` and `list[int] | None`."""
    inner, _ = without_none(tp)
    return is_union(tp) and (is_union(inner) or _is_literal(inner) or not _is_nested(inner))


def _is_nested(tp: Any) -> bool:
    return is_section(tp) or bool(typing.get_args(tp))


def _union_hook(tp: Any, converter: Converter) -> Hook:
    def hook(value: Any, _: Any) -> Any:
        for member in sorted(typing.get_args(tp), key=lambda arg: arg is float):
            if member is type(None):
                if value is None:
                    return None
                continue
            try:
                return converter.structure(value, member)
            except (MismatchError, BaseValidationError):
                continue
        raise mismatch(value, tp)

    return hook


def _is_sequence(tp: Any) -> bool:
    return (typing.get_origin(tp) or tp) in (tuple, list, frozenset)


def _sequence_hook(tp: Any, converter: Converter) -> Hook:
    container = typing.get_origin(tp) or tp
    args = typing.get_args(tp)
    fixed = container is tuple and bool(args) and args[-1] is not Ellipsis

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise mismatch(value, tp)
        if fixed and len(value) != len(args):
            raise MismatchError(f"expected {len(args)} values ({describe(tp)}), got {len(value)}")
        types = args if fixed else [args[0] if args else Any] * len(value)
        return container(_all(enumerate(value), types, tp, converter))

    return hook


def _is_dict(tp: Any) -> bool:
    origin = typing.get_origin(tp) or tp
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _dict_hook(tp: Any, converter: Converter) -> Hook:
    value_type = (*typing.get_args(tp), Any, Any)[1]

    def hook(value: Any, _: Any) -> Any:
        if not is_mapping(value):
            raise mismatch(value, tp)
        return dict(
            zip(
                value,
                _all(value.items(), [value_type] * len(value), tp, converter),
                strict=True,
            )
        )

    return hook


def _all(
    entries: typing.Iterable[tuple[int | str, Any]],
    types: typing.Sequence[Any],
    tp: Any,
    converter: Converter,
) -> list[Any]:
    """Structure every entry; raise all their errors together, each noted with its index or key."""
    done: list[Any] = []
    errors: list[Exception] = []
    for (key, entry), entry_type in zip(entries, types, strict=True):
        try:
            done.append(converter.structure(entry, entry_type))
        except Exception as error:  # noqa: BLE001 - raised again below, with all the others
            error.add_note(IterableValidationNote(f"at {key!r}", key, entry_type))
            errors.append(error)
    if errors:
        raise IterableValidationError(f"while structuring {tp}", errors, tp)
    return done


def _section_hook(declared: Any, converter: Converter) -> Hook:
    """Structures the class that the merge narrowed the section to, with its validators run field by field."""
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
    validator = field.attribute.validator
    # attrs stops at a class's first failing validator; its stock ones need no instance and can run apart.
    stock = _stock_parts(validator)

    def hook(value: Any, _: Any) -> Any:
        structured = converter.structure(value, field.type)
        for part in stock:
            part(None, field.attribute, structured)
        return structured

    return hook


def _stock_parts(validator: Any) -> list[Any]:
    """The validators of attrs' own that a validator is, or is made of."""
    if together := getattr(validator, "_validators", None):
        return [part for each in together for part in _stock_parts(each)]
    return [validator] if type(validator).__module__ == "attr.validators" else []


def _faults(error: Exception, path: KeyPath) -> Iterator[Fault]:
    if isinstance(error, BaseValidationError):
        for inner in error.exceptions:
            yield from _faults(inner, (*path, *_noted(inner)))
    else:
        yield Fault(path, error)


def _noted(error: Exception) -> KeyPath:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return (note.name,)
        if isinstance(note, IterableValidationNote):
            return (note.index,)
    return ()
