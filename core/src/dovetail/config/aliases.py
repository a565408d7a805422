"""Advice on unknown keys and invalid values: what to write instead. Packages add advice, as on other training systems' keys."""

from __future__ import annotations

import functools
from collections.abc import Callable

from dovetail.config.keys import KeyPath, format_path

_PRESET = "algorithm.preset"
_MISPLACED_PRESETS = (("preset",), ("preset", "name"), ("algorithm", "name"))


def key_advice(path: KeyPath, value: object) -> str | None:
    """Return advice on an unknown key with this value; None if no advice is known.

    Packages contribute advice, such as the equivalent of another training system's key, by entry points of `dovetail.key_advice`. An entry
    point is a function of the key's path and the value's text.
    """
    if path in _MISPLACED_PRESETS:
        name = value if isinstance(value, str) else "NAME"
        return f"unknown key; a preset is chosen by {_PRESET}={name}"
    return _contributed("dovetail.key_advice", path, value)


def value_advice(path: KeyPath, value: object) -> str | None:
    """Return what to write in place of a value that a key can't have; None if no advice is known.

    Packages contribute the advice by entry points of `dovetail.value_advice`. An entry point is a function of the key's path and the
    value's text.
    """
    if path == ("algorithm",) and isinstance(value, str):
        return f"a preset is chosen by {_PRESET}={value}"
    return _contributed("dovetail.value_advice", path, value)


def _contributed(group: str, path: KeyPath, value: object) -> str | None:
    key = format_path(path)
    return next(filter(None, (advise(key, str(value)) for advise in _advisers(group))), None)


@functools.cache
def _advisers(group: str) -> tuple[Callable[[str, str], str | None], ...]:
    from dovetail.plugins.index import default_index

    return tuple(entry_point.load() for entry_point, _ in default_index().extensions(group))
