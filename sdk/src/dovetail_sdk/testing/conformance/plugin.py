"""What holds for plugins of every kind."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import attrs
from packaging.specifiers import SpecifierSet

from dovetail.batch.columns import glossary
from dovetail.interfaces.plugin import Plugin, PluginContext
from dovetail.plugins.kinds import KINDS


class PluginConformance:
    """Base of every suite. A subclass sets `plugin`, and `config` where the default does not do."""

    kind: ClassVar[str]
    """The plugin's kind; the suite sets it."""
    plugin: ClassVar[type[Plugin]]
    """The class under test."""
    config: ClassVar[Any] = None
    """Its config; by default `plugin.Config(name=plugin.name)`."""

    def make_config(self) -> Any:
        """The config under test."""
        return self.config if self.config is not None else self.plugin.Config(name=self.plugin.name)

    def make(self, **context: Any) -> Any:
        """A plugin that has not been started."""
        return self.plugin(self.make_config(), PluginContext(**context))

    def test_name_is_a_plain_lower_case_word(self) -> None:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", self.plugin.name)

    def test_api_range_admits_this_interface(self) -> None:
        assert SpecifierSet(self.plugin.api).contains(KINDS[self.kind].api)

    def test_config_is_frozen_and_extends_the_section_of_its_kind(self) -> None:
        config = self.make_config()
        module, _, name = KINDS[self.kind].section.partition(":")
        base = getattr(__import__(module, fromlist=[name]), name)
        assert isinstance(config, base)
        assert attrs.has(type(config))
        try:
            config.name = "other"
        except attrs.exceptions.FrozenInstanceError:
            return
        raise AssertionError(f"{type(config).__name__} is not frozen")

    def test_every_column_that_it_names_is_declared(self) -> None:
        config = self.make_config()
        known = glossary(self.plugin.columns)
        named = self.plugin.requires(config) | self.plugin.provides(config)
        assert named <= known.keys(), f"undeclared: {sorted(named - known.keys())}"

    def test_close_may_be_called_twice_and_before_start(self) -> None:
        plugin = self.make()
        plugin.close()
        plugin.close()
