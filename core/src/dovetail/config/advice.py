"""What to write in place of a key or a value that people bring from elsewhere, or put in the wrong place."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from dovetail.config.aliases import foreign_advice, prefixed_advice, trl_advice, verl_advice
from dovetail.config.keys import KeyPath, format_path

_PRESET = "algorithm.preset"
_MISPLACED_PRESETS = (("preset",), ("preset", "name"), ("algorithm", "name"))
_VERL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""verl's names of KL estimators to Dovetail's."""
_KL = (("algorithm", "kl", "in_loss"), ("algorithm", "kl", "in_reward"))


def key_advice(path: KeyPath, value: Any, known: Container[KeyPath] = ()) -> str | None:
    """What to say of an unknown key with that value; None where the key means nothing elsewhere either; `known` are the config's own keys."""
    return replacement(path, value, known) or foreign_advice(path)


def replacement(path: KeyPath, value: Any, known: Container[KeyPath] = ()) -> str | None:
    """What to write in place of an unknown key with that value, or why nothing; None where nothing is known of it."""
    if path in _MISPLACED_PRESETS:
        name = value if isinstance(value, str) else "NAME"
        return f"unknown key; a preset is chosen by {_PRESET}={name}"
    return verl_advice(path) or prefixed_advice(path, known) or trl_advice(path)


def section_advice(path: KeyPath, value: Any) -> str | None:
    """What to write in place of a single value for a section; None where it can't be told."""
    if path == ("algorithm",) and isinstance(value, str):
        return f"a preset is chosen by {_PRESET}={value}"
    if path not in _KL:
        return None
    key = format_path(path)
    if value is False:
        return f"write {key}=null for no penalty"
    if value is True:
        return f"write {key}.coef= and the weight of the penalty"
    if isinstance(value, (int, float)):
        return f"write {key}.coef={value}"
    if isinstance(value, str):
        return f"write {key}.estimator={_VERL_ESTIMATORS.get(value, value)}"
    return None


def value_advice(path: KeyPath, value: Any) -> str | None:
    """What to write in place of verl's name of a KL estimator; None for any other value."""
    if path[:-1] not in _KL or path[-1] != "estimator" or not isinstance(value, str):
        return None
    ours = _VERL_ESTIMATORS.get(value.removesuffix("+"))
    if ours is None:
        return None
    # verl's `+` swaps the gradient, which a penalty in the reward has none of.
    plus = "+" if value.endswith("+") and path[-2] == "in_loss" and ours != "k2" else ""
    return f'verl\'s "{value}" is "{ours}{plus}"'
