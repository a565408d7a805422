"""Faults found while structuring, in words: unknown and missing keys, wrong types, broken bounds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cattrs.errors import ForbiddenExtraKeysError, StructureHandlerNotFoundError

from dovetail.config.advice import key_advice, value_advice
from dovetail.config.keys import KeyPath, format_path, leaves
from dovetail.config.merge import SectionDict
from dovetail.config.mismatch import MismatchError
from dovetail.config.problems import ABSENT, Problem
from dovetail.config.schema import fields_of
from dovetail.config.structure import Fault
from dovetail.errors import nearest

_ATTRS_MESSAGE = re.compile(r"'\w+' must be (?P<bound>.+?): .*", re.DOTALL)
_FEW = 3
"""So many places of a key are worth naming instead of a similar key."""


def problems_of(
    fault: Fault, tree: SectionDict, origins: Mapping[KeyPath, str]
) -> Iterator[Problem]:
    """What to tell about one fault; an unknown section of verl's gives a problem for each of its keys."""
    if isinstance(fault.error, ForbiddenExtraKeysError):
        for key in sorted(fault.error.extra_fields):
            yield from _unknown((*fault.path, key), fault.error.cl, tree, origins)
        return
    value = value_at(tree, fault.path)
    yield Problem(
        path=fault.path,
        value=ABSENT if isinstance(value, Mapping) else value,
        origin=origin_of(origins, fault.path) if value is not ABSENT else None,
        text=_text(fault, value),
    )


def value_at(tree: Any, path: KeyPath) -> Any:
    """The value at a key path of plain containers, or ABSENT."""
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return ABSENT
    return tree


def origin_of(origins: Mapping[KeyPath, str], path: KeyPath) -> str | None:
    """The layer that gave a key, or the container that it stands in."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return None


def _text(fault: Fault, value: Any) -> str:
    error = fault.error
    if isinstance(error, KeyError) and value is ABSENT:
        return "required, but no layer gives it"
    if isinstance(error, MismatchError):
        advice = value_advice(fault.path, value)
        return f"{str(error).partition('; did you mean')[0]}; {advice}" if advice else str(error)
    if isinstance(error, StructureHandlerNotFoundError):
        return f"its class declares the type {error.type_!r}, which a config can't hold"
    message = str(error.args[0]) if error.args else type(error).__name__
    if match := _ATTRS_MESSAGE.fullmatch(message):
        return f"must be {match['bound']}"
    return message


def _unknown(
    path: KeyPath, cls: type, tree: SectionDict, origins: Mapping[KeyPath, str]
) -> Iterator[Problem]:
    value = value_at(tree, path)
    told = False
    for leaf, leaf_value in leaves(value, path):
        if advice := key_advice(leaf, leaf_value):
            yield Problem(path=leaf, value=leaf_value, origin=origin_of(origins, leaf), text=advice)
            told = True
    if told:
        return
    yield Problem(
        path=path,
        value=ABSENT if isinstance(value, Mapping) else value,
        origin=origin_of(origins, path) or origin_of(origins, next(leaves(value, path))[0]),
        text=_nearest_key(path, cls, tree),
    )


def _nearest_key(path: KeyPath, cls: type, tree: SectionDict) -> str:
    key, section = str(path[-1]), path[:-1]
    known = fields_of(cls)
    close = nearest(key, known)
    elsewhere = [found for found in key_paths(tree) if found[-1] == key]
    # The very key in another place is likelier meant than a similar one here, unless it stands everywhere, as `name`
    # does, or is part of the similar one, as `every` is of `save_every`.
    if close and (key in close or not 0 < len(elsewhere) <= _FEW):
        elsewhere = [(*section, close)]
    if elsewhere:
        places = " or ".join(format_path(found) for found in elsewhere)
        return f"unknown key; did you mean {places}?"
    owner = value_at(tree, (*section, "name")) if section else ABSENT
    whose = f"{format_path(section)} {owner!r}" if isinstance(owner, str) else format_path(section)
    return f"unknown key; {whose or 'a config'} has {', '.join(sorted(known))}"


def key_paths(tree: SectionDict, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key that the sections of a merged tree could hold."""
    for name in fields_of(tree.cls):
        yield (*path, name)
        child = tree.get(name)
        if isinstance(child, SectionDict):
            yield from key_paths(child, (*path, name))
