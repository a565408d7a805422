"""What a plugin's author has set in its conformance suite: the config under test, and attributes of the suite."""

from __future__ import annotations

import json
from typing import Any

from dovetail.config.schema import fields_of
from dovetail.config.serialise import to_mapping

_ELSEWHERE = {"plugin", "config", "kind", "expected_failures"}
"""Attributes of a suite that `settings_of` leaves out, since a report shows them in other fields."""


def settings_of(suite: type) -> dict[str, Any]:
    """Return the settings of a suite that differ from the default suite of the plugin's kind, as JSON values.

    Returns:
        `config`, the config fields that differ from their defaults, and the suite's own attributes, such as `tolerance`. `config` is
        None if the suite's `make_config` works only inside a test.
    """
    plain = next(base for base in suite.__mro__ if "kind" in vars(base))
    own: dict[str, Any] = {}
    for name in dir(suite):
        value = getattr(suite, name)
        if name.startswith(("_", "test_")) or name in _ELSEWHERE or callable(value):
            continue
        if value != getattr(plain, name, None) and _is_plain(value):
            own[name] = value
    return {"config": _config(suite), **own}


def _config(suite: Any) -> dict[str, Any] | None:
    try:
        config = suite().make_config()
    except Exception:  # noqa: BLE001 - a suite may need its fixtures, and says itself in its tests what is wrong
        return None
    values = to_mapping(config)
    fields = fields_of(type(config))
    return {
        name: value
        for name, value in values.items()
        if name != "name" and getattr(config, name) != fields[name].default()
    }


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
