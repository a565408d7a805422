"""Hooks: events of a run that observers can listen to, broadcast by one pluggy manager.

An observer is any object with methods marked `@hookimpl`, named like a method of `HookSpec`; a method may take any subset of the arguments.
An observer is found through the entry-point group `dovetail.hooks` or given to `Observers.add`. A tracker is an observer that the config
selects; its methods need no mark. Exceptions of an observer are reported and counted; they stop neither the run nor other observers.
`DOVETAIL_SKIP_OBSERVERS=report,other` leaves installed observers out.
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
"""Version of the hooks; within 1.x, arguments and hooks may be added but not removed."""

_SKIP_VARIABLE = "DOVETAIL_SKIP_OBSERVERS"
"""Environment variable with the names of observers' entry points that are not loaded, separated by commas."""
_PROJECT = "dovetail"

hookimpl = pluggy.HookimplMarker(_PROJECT)
"""Decorator of a method that observes the hook of the same name."""

HOOKS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(member).parameters)[1:]
    for name, member in vars(HookSpec).items()
    if not name.startswith("_")
}
"""Names of each hook's arguments, by hook."""
# HookSpec's methods are marked here, so that the module of the interface need not import pluggy.
for _name in HOOKS:
    pluggy.HookspecMarker(_PROJECT)(getattr(HookSpec, _name))


class Observers:
    """The observers of a run: objects whose methods are called at events of the run, such as the start of a step.

    Attributes:
        hook: calls a hook of every observer, the latest added first: `observers.hook.step_started(step=1)`.
        failures: the number of failures by observer name.
    """

    def __init__(self, logger: Logger = None) -> None:
        self._logger = logger if logger is not None else logging.getLogger("dovetail.hooks")
        self._manager = pluggy.PluginManager(_PROJECT)
        self._manager.add_hookspecs(HookSpec)
        self.hook = self._manager.hook
        self.failures: Counter[str] = Counter()

    def load(self) -> None:
        """Add the observers that installed distributions declare, except those in `DOVETAIL_SKIP_OBSERVERS`; report failures to load."""
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
        """Add an observer, and return the name under which its failures are reported.

        This is `name`, by default the observer's class, with a number appended if another observer has the same name.

        Raises:
            PluginBrokenError: the observer implements no hook, an unknown hook, or a hook with an unknown argument.
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
        """Names of the observers, in the order in which they were added."""
        return tuple(name for name, _ in self._manager.list_name_plugin())

    def guarded(self, name: str, what: str, method: Callable[..., Any]) -> Callable[..., None]:
        """Wrap an observer's method, so that its exceptions are reported and counted, not raised.

        Args:
            name: the observer's name in reports, under which failures are counted.
            what: the hook's name in reports.
            method: the method.
        """

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
    """Return the names of the hooks that an observer implements: marked methods, or those that a tracker overrides."""
    if isinstance(observer, Tracker):
        return [n for n in HOOKS if getattr(type(observer), n) is not getattr(HookSpec, n)]
    mark = f"{_PROJECT}_impl"
    return [n for n in dir(observer) if hasattr(inspect.getattr_static(observer, n, None), mark)]


def _described() -> str:
    return ", ".join(f"{name}({', '.join(arguments)})" for name, arguments in HOOKS.items())
