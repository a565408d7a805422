"""Hooks: what observers of a run can listen to. Broadcast by one pluggy manager.

An observer is any object with methods marked `@hookimpl`, named like a method of `HookSpec`; a method may take
any subset of the arguments. It is found through the entry-point group `dovetail.hooks` or given to
`Observers.add`. A tracker is one that the config selects; its methods need no mark. What an observer raises is reported
and counted, and stops neither the run nor another observer. `DOVETAIL_SKIP_OBSERVERS=report,other` leaves installed ones out.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pluggy

from dovetail.errors import PluginBrokenError
from dovetail.interfaces.hooks import HookSpec
from dovetail.interfaces.plugin import Logger
from dovetail.interfaces.tracker import Tracker

HOOKS_API = "1.4"
"""Version of the hooks; an argument or a hook may be added within 1.x, none taken away."""

_SKIP_VARIABLE = "DOVETAIL_SKIP_OBSERVERS"
"""Environment variable: entry points of installed observers that are not loaded, separated by commas."""
_PROJECT = "dovetail"

hookimpl = pluggy.HookimplMarker(_PROJECT)
"""Marks a method as the observer of the hook of its name."""

HOOKS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(member).parameters)[1:]
    for name, member in vars(HookSpec).items()
    if not name.startswith("_")
}
"""Each hook with the names of its arguments."""
# Marked here and not in the interface, which needs no pluggy.
for _name in HOOKS:
    pluggy.HookspecMarker(_PROJECT)(getattr(HookSpec, _name))


class Observers:
    """The observers of a run.

    Attributes:
        hook: calls a hook of every observer, the latest added first: `observers.hook.step_started(step=1)`.
        failures: how often each observer failed, by its name.
    """

    def __init__(self, logger: Logger = None) -> None:
        self._logger = logger if logger is not None else logging.getLogger("dovetail.hooks")
        self._manager = pluggy.PluginManager(_PROJECT)
        self._manager.add_hookspecs(HookSpec)
        self.hook = self._manager.hook
        self.failures: Counter[str] = Counter()

    def load(self) -> None:
        """Add every observer that an installed distribution declares and `DOVETAIL_SKIP_OBSERVERS` does not name; one that can't be loaded is reported."""
        from dovetail.plugins.index import default_index

        skipped = os.environ.get(_SKIP_VARIABLE, "").split(",")
        for entry_point, distribution in default_index().extensions("dovetail.hooks"):
            if entry_point.name in skipped:
                continue
            name = f"{entry_point.name} ({distribution.name} {distribution.version})"
            try:
                found = entry_point.load()
                self.add(found() if isinstance(found, type) else found, name=name)
            except Exception as error:  # noqa: BLE001 - a broken observer may raise anything, and stops no run
                self._report(name, "could not be loaded", error)

    def add(self, observer: object, name: str | None = None) -> str:
        """Add an observer and return the name that reports use.

        Raises:
            PluginBrokenError: it implements a hook that does not exist, a hook with an unknown argument, or no hook at
                all.
        """
        name = name or f"{type(observer).__module__}.{type(observer).__qualname__}"
        unique, count = name, 1
        while self._manager.has_plugin(unique):
            count += 1
            unique = f"{name} #{count}"
        methods = {}
        for hook in _hooks_of(observer):
            methods[hook] = self.guarded(unique, hook, getattr(observer, hook))
            if isinstance(observer, Tracker):
                hookimpl(methods[hook])
        if not methods:
            raise PluginBrokenError(
                f"observer {unique} implements no hook: mark its methods with dovetail.hooks.hookimpl; "
                f"the hooks are {_described()}"
            )
        try:
            self._manager.register(SimpleNamespace(**methods), unique)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            self._manager.unregister(name=unique)
            raise PluginBrokenError(
                f"observer {unique}: {error}; the hooks are {_described()}"
            ) from error
        return unique

    @property
    def names(self) -> tuple[str, ...]:
        """The observers, in the order in which they were added."""
        return tuple(name for name, _ in self._manager.list_name_plugin())

    def guarded(self, name: str, what: str, method: Callable[..., Any]) -> Callable[..., None]:
        """Wrap a method so that its exceptions are reported and counted as failures of this observer."""

        @wraps(method)
        def call(*arguments: object) -> None:
            try:
                method(*arguments)
            except Exception as error:  # noqa: BLE001 - an observer may raise anything, and stops no run
                self._report(name, f"failed in {what}", error)

        return call

    def _report(self, name: str, what: str, error: Exception) -> None:
        self.failures[name] += 1
        self._logger.warning(
            f"observer {name} {what}: {type(error).__name__}: {error}", exc_info=error
        )


def _hooks_of(observer: object) -> list[str]:
    """Names of the methods that carry the mark; of a tracker, of the hooks that it overrides."""
    if isinstance(observer, Tracker):
        return [n for n in HOOKS if getattr(type(observer), n) is not getattr(HookSpec, n)]
    mark = f"{_PROJECT}_impl"
    return [n for n in dir(observer) if hasattr(inspect.getattr_static(observer, n, None), mark)]


def _described() -> str:
    return ", ".join(f"{name}({', '.join(arguments)})" for name, arguments in HOOKS.items())
