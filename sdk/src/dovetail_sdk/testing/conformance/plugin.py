"""The tests of plugins of every kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast

import attrs
import pytest
from packaging.specifiers import SpecifierSet

from dovetail.batch.columns import Column, glossary
from dovetail.errors import PluginError, nearest
from dovetail.interfaces import ColumnPlugin, Plugin, PluginContext
from dovetail.plugins.contract import import_object
from dovetail.plugins.index import default_index
from dovetail_sdk.check.signatures import differences

_KIT = __name__.rpartition(".")[0]


class PluginConformance:
    """Base of every conformance suite. A subclass sets `plugin`, and `config` if the default config is not enough.

    A subclass may add tests, but can't replace standard tests. Standard tests that can't hold for a plugin are listed in
    `expected_failures`; they still run and are reported with the reason.

    Raises:
        PluginError: a subclass overrides a standard test, or one of its `expected_failures` lacks a reason or names an unknown test.
    """

    kind: ClassVar[str]
    """The plugin's kind, set by each suite."""
    plugin: ClassVar[type[Plugin]]
    """The class under test."""
    config: ClassVar[Any] = None
    """The plugin's config; by default `plugin.Config(name=plugin.name)`."""
    expected_failures: ClassVar[Mapping[str, str]] = {}
    """Standard tests that fail for this plugin, each with the reason. A listed test that passes counts as a failure."""

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        if _is_standard(cls):
            return
        standard = {name: owner for name in dir(cls) if (owner := _standard_owner(cls, name))}
        for name, owner in standard.items():
            if (actual := next(base for base in cls.__mro__ if name in vars(base))) is not owner:
                raise PluginError(
                    f"{actual.__module__}.{actual.__qualname__} overrides the standard test {name} of {owner.__name__}",
                    hint="give your test another name; if the plugin can't pass the standard test, write in the class: "
                    f'expected_failures = {{"{name}": "the reason"}}',
                )
        for name, reason in cls.expected_failures.items():
            if name not in standard or not reason:
                near = nearest(name, standard)
                raise PluginError(
                    f"{cls.__qualname__}.expected_failures has {name!r}: {reason!r}; expected a standard test of the suite "
                    "and the reason why it fails",
                    hint=f"did you mean {near!r}?" if near and name not in standard else None,
                )

    @classmethod
    def of(cls, plugin: type[Plugin], config: Any = None, **attributes: Any) -> type[Self]:
        """Build the suite of a plugin in one line, without a subclass: `TestGrpo = AdvantageConformance.of(GrpoEstimator)`.

        Args:
            plugin: the class under test.
            config: the plugin's config; by default `plugin.Config(name=plugin.name)`.
            attributes: further class attributes of the suite, by name.
        """
        given = {"plugin": plugin, "config": config, **attributes, "__module__": plugin.__module__}
        return cast("type[Self]", type(f"Test{plugin.__name__}", (cls,), given))

    @pytest.fixture(autouse=True)
    def _as_expected(self, request: pytest.FixtureRequest) -> None:
        """Mark the running test as expected to fail, if `expected_failures` names it."""
        reason = self.expected_failures.get(getattr(request.node, "originalname", ""))
        if reason is not None:
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))

    def make_config(self) -> Any:
        """Return the config under test."""
        return self.config if self.config is not None else self.plugin.Config(name=self.plugin.name)

    def make(self, **context: Any) -> Any:
        """Construct the plugin under test without starting it. `context` holds fields of its `PluginContext`."""
        return self.plugin(self.make_config(), PluginContext(**context))

    def named_columns(self) -> frozenset[str]:
        """Return the names of the columns that the plugin reads or writes."""
        if not issubclass(self.plugin, ColumnPlugin):
            return frozenset()
        config = self.make_config()
        return self.plugin.requires(config) | self.plugin.provides(config)

    def known_columns(self) -> dict[str, Column]:
        """Return the columns that the plugin may read, by name: columns of core, of the plugin, and of installed plugins."""
        known = glossary(self.plugin.columns)
        for entry in default_index().entries():
            if entry.usable and entry.manifest is not None:
                for declared in entry.manifest.columns:
                    column: dict[str, Any] = dict(declared)
                    known.setdefault(column["name"], Column(**column))
        return known

    def needs(self, capability: str) -> None:
        """Skip the test if the plugin does not claim this capability."""
        if capability not in self.plugin.capabilities:
            pytest.skip(f"the plugin does not claim the capability {capability!r}")

    def test_name_is_a_plain_lower_case_word(self) -> None:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", self.plugin.name)

    def test_api_range_admits_this_interface(self) -> None:
        assert SpecifierSet(self.plugin.api).contains(default_index().kind(self.kind).api)

    def test_methods_can_be_called_as_the_interface_says(self) -> None:
        interface = import_object(default_index().kind(self.kind).interface)
        wrong = [difference.text for difference in differences(self.plugin, interface)]
        assert not wrong, "; ".join(wrong)

    def test_config_is_frozen_and_extends_the_section_of_its_kind(self) -> None:
        config = self.make_config()
        assert isinstance(config, import_object(default_index().kind(self.kind).section))
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            config.name = "other"

    def test_every_column_that_it_names_is_declared(self) -> None:
        known = self.known_columns()
        named = self.named_columns()
        assert named <= known.keys(), f"undeclared: {sorted(named - known.keys())}"

    def test_close_may_be_called_twice_and_before_start(self) -> None:
        plugin = self.make()
        plugin.close()
        plugin.close()


def _is_standard(cls: type) -> bool:
    """Return whether a class defines standard tests: a class of this kit, or the suite of a kind of plugin that another package adds."""
    return cls.__module__.startswith(_KIT) or "kind" in vars(cls)


def _standard_owner(cls: type, name: str) -> type | None:
    """Return the class that defines the standard test of this name (see `_is_standard`); None if there is none."""
    if not name.startswith("test"):
        return None
    owners = (base for base in cls.__mro__ if _is_standard(base))
    return next((base for base in owners if name in vars(base)), None)
