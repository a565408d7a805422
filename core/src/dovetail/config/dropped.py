"""What earlier layers wrote for another plugin than the one that is chosen, and what is said of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from dovetail.config.keys import KeyPath, format_path
from dovetail.config.layers import Layer
from dovetail.config.problems import Problem, show_value


@attrs.frozen(kw_only=True)
class Dropped:
    """A key that has no part in the config."""

    path: KeyPath
    value: Any
    layer: Layer
    """What gave it."""
    known: bool
    """Whether the chosen plugin has such a key too."""


def in_words(dropped: Iterable[Dropped], choice: str) -> Iterator[str]:
    """One sentence for all keys that go for the same reason.

    Args:
        dropped: the keys of one section.
        choice: the plugin that was chosen in place of another, and by what, in words.
    """
    for known, group in itertools.groupby(sorted(dropped, key=_known), key=_known):
        keys = list(group)
        one = len(keys) == 1
        lacks = "has no such key" if one else "has no such keys"
        without = "stands for a combination without " + ("it" if one else "them")
        text = f"dropped: {choice} {without if known else lacks}"
        if one:
            (key,) = keys
            origin = key.layer.at(key.path)
            yield str(Problem(path=key.path, value=key.value, origin=origin, text=text))
        else:
            named = ", ".join(f"{format_path(key.path)} = {show_value(key.value)}" for key in keys)
            places = ", ".join(dict.fromkeys(key.layer.at(key.path) for key in keys))
            yield f"{named} ({places}): {text}"


def _known(dropped: Dropped) -> bool:
    return dropped.known
