"""The suite of presets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dovetail.config import config_from_mapping
from dovetail.config.keys import format_path, leaves
from dovetail.config.load import LoadedConfig, installed_config_class
from dovetail.config.plain_yaml import parse
from dovetail.config.presets import plain_settings
from dovetail.config.serialise import dump_yaml, to_mapping
from dovetail.interfaces import Preset
from dovetail_sdk.testing.conformance.plugin import PluginConformance


class PresetConformance(PluginConformance):
    """Conformance suite for presets, which are published combinations of settings: subclass it and set `plugin`.

    The plugins that the preset names must be installed.
    """

    kind = "preset"
    plugin: ClassVar[type[Preset]]
    mapping: ClassVar[Mapping[str, Any]] = {"model": {"path": "tiny"}}
    """The config with which the preset is tested."""

    def config_class(self, kind: str, section: Mapping[str, Any]) -> type:
        """Return the Config class of an installed plugin, or of the preset under test, which need not be installed."""
        if (kind, section.get("name")) == (self.kind, self.plugin.name):
            return self.plugin.Config
        return installed_config_class(kind, section)

    def load(self, *overrides: str) -> LoadedConfig:
        """Load the config under test with the preset applied."""
        own = {
            key: value for key, value in to_mapping(self.make_config()).items() if value is not None
        }
        given = {**self.mapping, "algorithm": {"preset": {**own, "name": self.plugin.name}}}
        return config_from_mapping(given, overrides, resolver=self.config_class)

    def given_keys(self) -> list[str]:
        """Return every key that the preset sets."""
        return [format_path(path) for path, _ in leaves(plain_settings(self.make_config()))]

    def test_its_settings_make_a_valid_config(self) -> None:
        assert self.load().warnings == ()

    def test_it_sets_something_and_explain_names_it(self) -> None:
        origins = set(self.load().provenance.values())
        assert self.given_keys()
        assert f"preset '{self.plugin.name}'" in origins

    def test_any_key_that_is_given_wins(self) -> None:
        loaded = self.load("algorithm.advantage={name: grpo, norm_by_std: false}", "actor.epochs=7")
        assert loaded.config.algorithm.advantage.name == "grpo"
        assert loaded.config.actor.epochs == 7

    def test_learning_rates_batch_sizes_and_paths_are_left_to_the_user(self) -> None:
        forbidden = ("lr", "train_batch_size", "path", "train_files", "val_files", "n")
        own = [key for key in self.given_keys() if key.rpartition(".")[2] in forbidden]
        assert not own

    def test_the_resolved_config_reads_back_the_same(self) -> None:
        loaded = self.load()
        again, _ = parse(dump_yaml(loaded.config))
        read = config_from_mapping(again, resolver=self.config_class)
        assert (read.config, read.warnings) == (loaded.config, ())
