"""Hooks: what observers of a run can listen to. Broadcast by pluggy, one observer at a time.

An observer is any object with methods marked `@hookimpl`, named like a method of `HookSpec`; a method may take
any subset of the arguments. It is found through the entry-point group `dovetail.hooks` or given to
`Observers.add`. What it raises is reported and counted, and stops neither the run nor another observer.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pluggy

from dovetail.errors import nearest

HOOKS_API = "1.2"
"""Version of the hooks below; an argument or a hook may be added within 1.x, none taken away."""

_PROJECT = "dovetail"

hookimpl = pluggy.HookimplMarker(_PROJECT)
"""Marks a method as the observer of the hook of its name."""
_hookspec = pluggy.HookspecMarker(_PROJECT)


class HookSpec:
    """Everything that can be observed. Arguments are for reading: an observer changes none of them."""

    @_hookspec
    def run_started(self, config: Any, plan: Any, directory: Path) -> None:
        """The run begins: its whole `RunConfig`, the `Plan` of a step, and the run directory."""

    @_hookspec
    def run_finished(self, summary: Mapping[str, Any]) -> None:
        """The run ended, well or not; `summary` is what `summary.json` holds by now, `status` among it."""

    @_hookspec
    def step_started(self, step: int) -> None:
        """A step begins; the first is 1."""

    @_hookspec
    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step ended, with all of its metrics."""

    @_hookspec
    def rollout_finished(self, step: int, samples: Sequence[Any]) -> None:
        """All samples of the step are generated and scored; each has its prompt, completion and outcome."""

    @_hookspec
    def reward_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Scoring passed its checks; the step's metrics so far (`reward/mean`, `reward/failures`, …)."""

    @_hookspec
    def stage_finished(self, step: int, stage: str, before: Any, after: Any) -> None:
        """A stage ran: the `Batch` that it was given, and the one that it returned."""

    @_hookspec
    def update_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """All updates are through, so that the step counts; their metrics (`actor/…`, `critic/…`)."""

    @_hookspec
    def checkpoint_saved(self, step: int, path: Path) -> None:
        """A complete checkpoint of so many finished steps lies at `path`."""

    @_hookspec
    def failure(self, step: int, error: BaseException) -> None:
        """The run fails with this error after so many finished steps; `run_finished` follows."""


HOOKS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(member).parameters)[1:]
    for name, member in vars(HookSpec).items()
    if not name.startswith("_")
}
"""Each hook with the names of its arguments."""


class Observers:
    """The observers of a run.

    Attributes:
        failures: how often each observer failed, by its name.
    """

    def __init__(self, logger: Any = None) -> None:
        self._logger = logger if logger is not None else logging.getLogger("dovetail.hooks")
        # A manager an observer: one that fails then stops no other, and is known by name.
        self._managers: dict[str, pluggy.PluginManager] = {}
        self.failures: Counter[str] = Counter()

    @classmethod
    def load(cls, logger: Any = None) -> Observers:
        """Every observer that an installed distribution declares; one that can't be loaded is reported."""
        from dovetail.plugins.index import default_index

        observers = cls(logger)
        for entry_point, distribution in default_index().extensions("dovetail.hooks"):
            name = f"{entry_point.name} ({distribution.name} {distribution.version})"
            try:
                found = entry_point.load()
                observers.add(found() if isinstance(found, type) else found, name=name)
            except Exception as error:  # noqa: BLE001 - a broken observer may raise anything, and stops no run
                observers._report(name, "could not be loaded", error)
        return observers

    def add(self, observer: object, name: str | None = None) -> str:
        """Add an observer and return the name that reports use.

        Raises:
            ValueError: it implements a hook that does not exist, asks for an argument that the hook lacks, or none at all.
        """
        name = name or f"{type(observer).__module__}.{type(observer).__qualname__}"
        unique, count = name, 1
        while unique in self._managers:
            count += 1
            unique = f"{name} #{count}"
        manager = pluggy.PluginManager(_PROJECT)
        manager.add_hookspecs(HookSpec)
        try:
            manager.register(observer, unique)
            manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise ValueError(f"observer {unique}: {error}; the hooks are {_described()}") from error
        if not manager.get_hookcallers(observer):
            raise ValueError(
                f"observer {unique} implements no hook: mark its methods with dovetail.hooks.hookimpl; "
                f"the hooks are {_described()}"
            )
        self._managers[unique] = manager
        return unique

    @property
    def names(self) -> tuple[str, ...]:
        """The observers, in the order in which they are called."""
        return tuple(self._managers)

    def emit(self, hook: str, **arguments: Any) -> None:
        """Tell every observer, one by one. What one raises is reported and counted.

        Raises:
            TypeError: the hook does not exist, or is emitted with other arguments than it documents.
        """
        if hook not in HOOKS:
            near = nearest(hook, HOOKS)
            raise TypeError(
                f"there is no hook {hook!r}" + (f"; did you mean {near!r}?" if near else "")
            )
        if set(arguments) != set(HOOKS[hook]):
            raise TypeError(
                f"hook {hook!r} takes {', '.join(HOOKS[hook])}, not {', '.join(sorted(arguments))}"
            )
        for name, manager in self._managers.items():
            try:
                getattr(manager.hook, hook)(**arguments)
            except Exception as error:  # noqa: BLE001 - an observer may raise anything, and stops no run
                self._report(name, f"failed in {hook}", error)

    def _report(self, name: str, what: str, error: Exception) -> None:
        self.failures[name] += 1
        self._logger.warning(
            f"observer {name} {what}: {type(error).__name__}: {error}", exc_info=error
        )


def _described() -> str:
    return ", ".join(f"{name}({', '.join(arguments)})" for name, arguments in HOOKS.items())
