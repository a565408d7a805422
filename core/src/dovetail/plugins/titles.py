"""How messages name a plugin that runs: its kind and name, and the distribution and version that it comes from."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from dovetail.plugins.index import default_index

if TYPE_CHECKING:
    from dovetail.interfaces.plugin import Plugin


def title_of(kind: str, plugin: Plugin) -> str:
    """`advantage/grpo (dovetail-algorithms 0.1.0)`, or the class and the file of a plugin that no distribution brought."""
    cls = type(plugin)
    name = getattr(cls, "name", cls.__name__)
    for entry in default_index().entries(kind):
        if entry.name == name and entry.target.rpartition(":")[2] == cls.__qualname__:
            return entry.title
    try:
        return f"{kind}/{name} ({cls.__qualname__} of {inspect.getsourcefile(cls)})"
    except TypeError:  # a class that was made without a file
        return f"{kind}/{name} ({cls.__module__}.{cls.__qualname__})"
