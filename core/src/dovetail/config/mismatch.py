"""Errors about a value of the wrong type: the expected type, the given value, and a fix."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any, Literal

from dovetail.config.plain_yaml import YamlTextError, parse
from dovetail.config.schema import describe, is_union
from dovetail.errors import nearest

_YAML_1_1_BOOLEANS = {"yes": "true", "on": "true", "y": "true"} | dict.fromkeys(
    ("no", "off", "n"), "false"
)


class MismatchError(ValueError):
    """A value is not of the field's type, or not one of the field's choices."""


def mismatch(value: object, tp: object) -> MismatchError:
    """Return the error for a value that a type does not allow, with the way to fix it."""
    expected = describe(tp)
    got = "" if isinstance(value, str) and _choices(tp) else f", got {_kind(value)}"
    advice = _advice(value, tp)
    return MismatchError(f"expected {expected}{got}" + (f"; {advice}" if advice else ""))


def fits_float32(value: float) -> bool:
    """Return whether a number is finite in float32; a run converts most numbers to float32."""
    return abs(value) < 2.0**128


def _kind(value: object) -> str:
    if isinstance(value, (int, float)) and not fits_float32(value):
        return "a number that is not finite in float32"
    names: dict[type, str] = {
        type(None): "null",
        str: "text",
        list: "a list",
        tuple: "a list",
        dict: "a mapping",
    }
    return next(
        (name for cls, name in names.items() if isinstance(value, cls)), type(value).__name__
    )


def _advice(value: Any, tp: Any) -> str | None:
    members = set(_members(tp))
    if choices := _choices(tp):
        close = nearest(value, choices) if isinstance(value, str) else None
        return f'did you mean "{close}"?' if close else None
    if isinstance(value, bool):
        return None
    if members & {str, Path} and isinstance(value, (int, float)):
        return f'write "{value}" in quotes for text'
    if bool in members and isinstance(value, str) and value.lower() in _YAML_1_1_BOOLEANS:
        return f"write {_YAML_1_1_BOOLEANS[value.lower()]}"
    if int in members and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"write {int(value)}"
    if members & {int, float, bool} and isinstance(value, str):
        return _unquoted(value, members)
    if bool in members and value in (0, 1):
        return f"write {'true' if value else 'false'}"
    if typing.get_origin(tp) in (tuple, list, frozenset) and isinstance(value, str):
        return f"write [{value}]"
    return None


def _members(tp: object) -> tuple[Any, ...]:
    return typing.get_args(tp) if is_union(tp) else (tp,)


def _choices(tp: object) -> list[str]:
    """Return the values that a Literal, alone or in a union, allows, as texts."""
    literals = [member for member in _members(tp) if typing.get_origin(member) is Literal]
    return [str(choice) for literal in literals for choice in typing.get_args(literal)]


def _unquoted(value: str, members: set[Any]) -> str | None:
    """Return advice to remove the quotes if the text, unquoted, has one of the allowed types (`members`); else None."""
    try:
        bare, _ = parse(value)
    except YamlTextError:
        return None
    fits = type(bare) in members or (type(bare) is int and float in members)
    return f"write {value} without quotes" if fits else None
