"""The choice of an installed plugin's conformance suites: those that its package declares, or else the suite of its kind."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.config.interpolate import Interpolator
from dovetail.config.layers import ConfigLayer
from dovetail.config.load import installed_config_class, raise_problems
from dovetail.config.merge import Merger
from dovetail.config.overrides import read_overrides
from dovetail.config.serialise import to_mapping
from dovetail.config.structure import structure
from dovetail.config.wording import problems_of
from dovetail.errors import ConfigError, PluginBrokenError
from dovetail.interfaces import Plugin
from dovetail.plugins.index import default_index
from dovetail.plugins.kinds import KINDS
from dovetail_sdk.check.shipping import NotHereError

UNDER_TEST: dict[str, type] = {}
"""The suites of the plugin that this process checks, by class name. The test file that pytest collects imports them from here."""
DECLARATIONS = "conformance"
"""Name of the module that may hold a package's own suites, in the plugin's folder or in a folder above within the package."""


def class_name(name: str) -> str:
    """Convert a lower-case name to the name of a class: `dispatch_mode` → `DispatchMode`."""
    return "".join(part.capitalize() for part in name.split("_"))


def suite_name(kind: str) -> str:
    """Return the class name of the conformance suite for a kind of plugin."""
    return f"{class_name(kind)}Conformance"


def suite_module(kind: str) -> str:
    """Return the module that holds a kind's suite: the SDK's, or `testing` of the package that defines the kind."""
    if kind in KINDS:
        return "dovetail_sdk.testing.conformance"
    return f"{default_index().kind(kind).interface.partition('.')[0]}.testing"


def suites_for(
    cls: type[Plugin], kind: str, package: str, overrides: Sequence[str] = ()
) -> dict[str, type]:
    """Return the suites that check a plugin, by the name under which pytest finds them.

    The suites come from the nearest `conformance.py` that has suites of this class, searched from the folder of the class's module up to
    the package's folder. Without such a file, the default suite of the kind is used. Overrides change the config of every suite.

    Raises:
        PluginBrokenError: importing `conformance.py` fails.
        ConfigError: an override is wrong, or overrides are given but do not set every required setting.
        NotHereError: the plugin has required settings, and no override is given.
    """
    suite = _suite_of(kind)
    declared = _declared(cls, suite, package)
    if declared:
        return {name: _amended(one, kind, overrides) for name, one in declared.items()}
    try:
        config = config_under_test(kind, {"name": cls.name}, overrides)
    except ConfigError as error:
        if overrides:
            raise
        raise NotHereError(
            f"the conformance suite can't run with the default settings of {kind}/{cls.name}: {error.message}",
            hint=f"give the settings: dovetail plugins check {kind}/{cls.name} KEY=VALUE",
        ) from error
    given = {"plugin": cls, "config": config}
    name = f"Test{class_name(cls.name)}"
    return {name: type(name, (suite,), {**given, "__module__": "dovetail_check"})}


def _suite_of(kind: str) -> type:
    module = suite_module(kind)
    try:
        return getattr(importlib.import_module(module), suite_name(kind))
    except (ImportError, AttributeError) as error:
        raise PluginBrokenError(
            f"the conformance suite of the kind {kind!r} can't be imported: {error}",
            hint=f"define the class {suite_name(kind)} in the module {module} of the package that adds the kind",
        ) from error


def config_under_test(kind: str, tree: Mapping[str, Any], overrides: Sequence[str]) -> Any:
    """Return the plugin's config from given settings and `key=value` overrides.

    Args:
        kind: the plugin's kind.
        tree: the settings as a mapping, `name` among them.
        overrides: `key=value` overrides, which take precedence over `tree`.

    Raises:
        ConfigError: the config is wrong; the message lists every problem.
    """
    config_class = installed_config_class(kind, tree)
    layers, problems = read_overrides(list(overrides), rank=1)
    layers = [ConfigLayer(rank=0, name="the suite's config", tree=dict(tree)), *layers]
    merger = Merger(
        installed_config_class, Interpolator(config_class, layers, installed_config_class)
    )
    merged = merger.merge(config_class, layers)
    config, faults = structure(merged)
    problems += merger.problems
    for fault in faults:
        problems += problems_of(fault, merged, merger.origins)
    raise_problems(f"{kind}/{tree['name']}", problems, merger.origins)
    return config


def _amended(suite: type, kind: str, overrides: Sequence[str]) -> type:
    """Return a subclass of a suite whose config is changed by overrides; the suite itself without overrides.

    Raises:
        ConfigError: an override is invalid.
    """
    if not overrides:
        return suite

    def make_config(self: object) -> Any:
        return config_under_test(kind, to_mapping(suite.make_config(self)), overrides)  # type: ignore[attr-defined]

    made = type(
        suite.__name__, (suite,), {"make_config": make_config, "__module__": "dovetail_check"}
    )
    made().make_config()
    return made


def _declared(cls: type[Plugin], suite: type, package: str) -> dict[str, type]:
    """Return the suites from the nearest module that declares one for the class; empty if no module does."""
    folders = cls.__module__.split(".")[:-1]
    inside = [".".join(folders[:depth]) for depth in range(len(folders), 1, -1)]
    for place in [*(one for one in inside if one.startswith(f"{package}.")), package]:
        if found := _declared_in(f"{place}.{DECLARATIONS}", cls, suite):
            return found
    return {}


def _declared_in(module_name: str, cls: type[Plugin], suite: type) -> dict[str, type]:
    try:
        if importlib.util.find_spec(module_name) is None:
            return {}
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise PluginBrokenError(
            f"the module {module_name}, which declares the package's conformance suites, can't be imported: {type(error).__name__}: {error}",
            hint="correct the module, or remove it: `dovetail plugins check` then runs the kind's default conformance suite",
        ) from error
    return {
        name: found
        for name, found in vars(module).items()
        if isinstance(found, type)
        and issubclass(found, suite)
        and getattr(found, "plugin", None) is cls
        and name.startswith("Test")
    }
