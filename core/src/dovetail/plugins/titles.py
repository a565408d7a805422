"""The name of a running plugin in messages: kind, name, distribution and version."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.errors import DovetailError, PluginBrokenError
from dovetail.plugins.index import default_index

if TYPE_CHECKING:
    from dovetail.interfaces.plugin import Plugin
    from dovetail.sections import PluginSection


def title_of(kind: str, plugin: Plugin) -> str:
    """Return a plugin's name for messages: `advantage/grpo (dovetail-algorithms 0.1.0)`; for a plugin of a file, its class and file."""
    cls = type(plugin)
    name = getattr(cls, "name", cls.__name__)
    for entry in default_index().entries(kind):
        if entry.name == name and entry.target.rpartition(":")[2] == cls.__qualname__:
            return entry.title
    try:
        return f"{kind}/{name} ({cls.__qualname__} of {inspect.getsourcefile(cls)})"
    except TypeError:  # the class was not defined in a file
        return f"{kind}/{name} ({cls.__module__}.{cls.__qualname__})"


def called(title: Callable[[], str], method: Callable[..., Any], *arguments: object) -> Any:
    """Call a plugin's method and return its result.

    Raises:
        PluginBrokenError: the method raised an error other than a DovetailError; the message has `title`, file and line.
    """
    try:
        return method(*arguments)
    except DovetailError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}"
        raise PluginBrokenError(
            f"{title()} raised {type(error).__name__}: {error} ({where})",
            hint="DOVETAIL_TRACEBACK=1 shows the whole traceback",
        ) from error


def broken_plugin(kind: str, section: PluginSection, problem: str) -> PluginBrokenError:
    """Return the error for a plugin, selected by `section`, that violates its interface."""
    if section.path is not None or section.name is None:
        title, hint = f"{kind} {section.attribute} of {section.path}", "correct the file"
    else:
        title = default_index().find(kind, section.name).title
        hint = f"report this to the plugin's author; `dovetail plugins check {kind}/{section.name}` shows more"
    return PluginBrokenError(f"{title}: {problem}", hint=hint)


def describe(value: object) -> str:
    """Return the description of a value: dtype and shape of an array, the type of another value."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__
