"""Advice on misplaced keys and values, and on keys of other systems, which packages contribute."""

from __future__ import annotations

import functools
from collections.abc import Callable

from dovetail.config.keys import KeyPath, format_path

_GROUP = "dovetail.key_advice"
_PRESET = "algorithm.preset"
_MISPLACED_PRESETS = (("preset",), ("preset", "name"), ("algorithm", "name"))
_KL = (("algorithm", "kl", "in_loss"), ("algorithm", "kl", "in_reward"))
_KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""Names of KL estimators in verl, and their names in Dovetail."""


def key_advice(path: KeyPath, value: object) -> str | None:
    """Return advice on an unknown key with this value; None if no other system has the key.

    Packages contribute the advice by entry points of `dovetail.key_advice`: functions of the key's path and the value's text.
    """
    if path in _MISPLACED_PRESETS:
        name = value if isinstance(value, str) else "NAME"
        return f"unknown key; a preset is chosen by {_PRESET}={name}"
    key = format_path(path)
    return next(filter(None, (advise(key, str(value)) for advise in _advisers())), None)


@functools.cache
def _advisers() -> tuple[Callable[[str, str], str | None], ...]:
    from dovetail.plugins.index import default_index

    return tuple(entry_point.load() for entry_point, _ in default_index().extensions(_GROUP))


def section_advice(path: KeyPath, value: object) -> str | None:
    """Return what to write in place of a single value that was given for the section at `path`; None if no advice is known."""
    if path == ("algorithm",) and isinstance(value, str):
        return f"a preset is chosen by {_PRESET}={value}"
    if path not in _KL:
        return None
    key = format_path(path)
    if value is False:
        return f"write {key}=null for no penalty"
    if value is True:
        return f"write {key}.coef=WEIGHT, the weight of the penalty"
    if isinstance(value, (int, float)):
        return f"write {key}.coef={value}"
    if isinstance(value, str):
        return f"write {key}.estimator={_KL_ESTIMATORS.get(value, value)}"
    return None


def value_advice(path: KeyPath, value: object) -> str | None:
    """Return a hint that translates another system's name of a KL estimator; None for any other value."""
    if path[:-1] not in _KL or path[-1] != "estimator" or not isinstance(value, str):
        return None
    ours = _KL_ESTIMATORS.get(value.removesuffix("+"))
    if ours is None:
        return None
    # `+` replaces the gradient of the estimator; a penalty in the reward has no gradient.
    plus = "+" if value.endswith("+") and path[-2] == "in_loss" and ours != "k2" else ""
    return f'verl\'s "{value}" is "{ours}{plus}"'
