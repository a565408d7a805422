"""Key paths: `tracking[1].name` as text, `("tracking", 1, "name")` in code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

KeyPath = tuple[str | int, ...]

ABSENT: Any = object()
"""Placeholder for the value of a key that was not given."""

GIVEN = "given"
"""Top-level key that a run adds to the config that it writes: the key paths that the user gave. All other values follow from these."""

MAX_DEPTH = 100
"""Maximum nesting of mappings and lists in a config; deeper ones could exceed Python's recursion limit."""

_PLAIN = re.compile(r"[^.\[\]=\"\s]+")
_SEGMENT = re.compile(
    r"""\[(?P<index>\d+)\] | \["(?P<quoted>(?:[^"\\]|\\.)*)"\] | (?P<dot>\.?)(?P<plain>[^.\[\]=\"\s]+)""",
    re.VERBOSE,
)


def format_path(path: KeyPath) -> str:
    """Return a key path as text; a key that holds dots, brackets or spaces is quoted: `functions["a.b"]`."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        elif _PLAIN.fullmatch(key):
            text += f".{key}" if text else key
        else:
            text += f"[{json.dumps(key, ensure_ascii=False)}]"
    return text


def parse_path(text: str) -> KeyPath:
    """Parse a key path in the form that `format_path` writes.

    Raises:
        ValueError: the text is not a key path; the error gives the first wrong character.
    """
    path: list[str | int] = []
    position = 0
    while position < len(text):
        match = _SEGMENT.match(text, position)
        if match is None or (match["plain"] is not None and (match["dot"] == "") != (not path)):
            raise ValueError(
                f"{text!r} is not a key path: the part {text[position:]!r} can't be read"
            )
        if match["index"] is not None:
            path.append(int(match["index"]))
        elif match["quoted"] is not None:
            path.append(str(json.loads(f'"{match["quoted"]}"')))
        else:
            path.append(match["plain"])
        position = match.end()
    if not path or isinstance(path[0], int):
        raise ValueError(f"{text!r} is not a key path: it must begin with the name of a section")
    if len(path) > MAX_DEPTH:
        raise ValueError(f"the key path has {len(path)} levels; expected at most {MAX_DEPTH}")
    return tuple(path)


def leaves(
    value: object, path: KeyPath = (), *, lists: bool = True
) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every scalar and empty container in nested plain containers, with its key path; without `lists`, each list as a whole."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from leaves(child, (*path, key), lists=lists)
    elif lists and isinstance(value, (list, tuple)) and value:
        for index, child in enumerate(value):
            yield from leaves(child, (*path, index))
    else:
        yield path, value


def value_at(tree: Any, path: KeyPath) -> Any:
    """Return the value at a key path in nested plain containers; ABSENT if there is none."""
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return ABSENT
    return tree


def selection(tree: Mapping[str, Any], paths: Iterable[KeyPath]) -> dict[str, Any]:
    """Return the part of nested mappings that these key paths select, with the same nesting."""
    selected: dict[str, Any] = {}
    for path in paths:
        if (value := value_at(tree, path)) is not ABSENT:
            holder = selected
            for key in path[:-1]:
                holder = holder.setdefault(str(key), {})
            holder[str(path[-1])] = value
    return selected
