"""The differences between two manifests, as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def differences(committed: Mapping[str, Any], derived: Mapping[str, Any]) -> list[str]:
    """Return the differences between two manifests, one line each."""
    found = [
        f"{key} is {committed.get(key)!r}, should be {derived[key]!r}"
        for key in ("schema", "distribution")
        if committed.get(key) != derived[key]
    ]
    before, after = (
        {f"{p.get('kind')}/{p.get('name')}": p for p in manifest.get("plugins", [])}
        for manifest in (committed, derived)
    )
    for title in sorted(before.keys() | after.keys()):
        if title not in after:
            found.append(f"{title} is in the manifest, but not among the entry points")
        elif title not in before:
            found.append(f"{title} is missing")
        else:
            keys = [key for key in after[title] if before[title].get(key) != after[title][key]]
            found += [
                _difference(title, key, before[title].get(key), after[title][key]) for key in keys
            ]
    return found


def _difference(title: str, key: str, committed: object, derived: object) -> str:
    if key in ("doc", "settings"):
        return f"{title}: its {'docstring has' if key == 'doc' else 'settings have'} changed"
    if key == "config_schema":
        return f"{title}: the fields or docs of its Config have changed"
    return f"{title}: {key} is {json.dumps(committed)}, should be {json.dumps(derived)}"
