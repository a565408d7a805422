"""The preflight rules of installed packages, found through the entry points of one group."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from dovetail.interfaces.preflight import PreflightRule
from dovetail.plugins.index import default_index

GROUP = "dovetail.preflight"
"""Entry-point group: `name = "module"` for a module whose public functions are all rules, or `name = "module:function"`."""


@dataclass(frozen=True)
class InstalledRule:
    """A preflight rule of an installed package."""

    name: str
    """Id of the rule: the name of its function."""
    distribution: str
    doc: str
    """Docstring of the rule; or the import error, if the rule can't be imported."""
    check: PreflightRule


def installed_rules() -> list[InstalledRule]:
    """Import the preflight rules of all installed packages, and return them in order of name.

    An entry point that can't be imported becomes a rule of the same name, which raises the import error.
    """
    rules = []
    for entry_point, distribution in default_index().extensions(GROUP):
        try:
            functions = dict(_functions(entry_point.load()))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a package may raise anything, and breaks no other
            why = f"It can't be imported: {type(error).__name__}: {error}"
            failing = partial(_fail, error)
            rules.append(InstalledRule(entry_point.name, distribution.name, why, failing))
        else:
            rules += [
                InstalledRule(name, distribution.name, inspect.getdoc(rule) or "", rule)
                for name, rule in functions.items()
            ]
    return sorted(rules, key=lambda rule: (rule.name, rule.distribution))


def _functions(target: Any) -> Iterator[tuple[str, PreflightRule]]:
    if not isinstance(target, ModuleType):
        yield target.__name__, target
        return
    for name, function in vars(target).items():
        own = inspect.isfunction(function) and function.__module__ == target.__name__
        if own and not name.startswith("_"):
            yield name, function


def _fail(error: BaseException, *_: Any) -> Any:
    raise error
