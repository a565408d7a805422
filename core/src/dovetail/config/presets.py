"""`algorithm.preset`: the settings that it stands for become a layer between the defaults and the first config file."""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from dovetail.config.fields import PluginSection, PresetSection, plugin_field
from dovetail.config.interpolate import Interpolator
from dovetail.config.keys import KeyPath, format_path
from dovetail.config.layers import PRESET_RANK, Layer, is_mapping
from dovetail.config.merge import Merger
from dovetail.config.problems import ABSENT, Problem
from dovetail.config.selection import Resolver
from dovetail.config.structure import structure

SECTION, KEY = PATH = ("algorithm", "preset")
"""Where a config selects a preset."""


@attrs.frozen(kw_only=True)
class _Algorithm:
    preset: PluginSection | None = plugin_field("preset", None)


@attrs.frozen(kw_only=True)
class _Run:
    """As much of a config as the choice of a preset needs."""

    algorithm: _Algorithm = attrs.field(factory=_Algorithm)


@attrs.frozen(kw_only=True)
class PresetLayer:
    """What the selected preset contributes."""

    layer: Layer
    section: PresetSection
    """The preset's own config, which its settings were made from."""
    named_by: Layer
    """The last layer that speaks of the preset."""

    def problems(self, section: Any) -> list[Problem]:
        """What is wrong with the preset's own section, once its settings take part in the config."""
        if section == self.section:
            return []
        return [
            Problem(
                path=PATH,
                text="its own settings refer to a key that the preset sets; give them values, or refer to another key",
            )
        ]

    def warnings(self, origins: Mapping[KeyPath, str], first: Layer) -> list[str]:
        """A preset named over a config that gives every one of its keys, as a run's own config does, changes nothing."""
        hidden = bool(self.layer.tree) and self.layer.name not in origins.values()
        if not hidden or self.named_by.rank == first.rank:
            return []
        text = (
            f"{self.layer.name} ({self.named_by.at(PATH)}) changes nothing: {first.name} gives every key that it "
            "sets, and keys win over presets; name it over a config that leaves them out"
        )
        return [text]


def preset_layer(
    cls: type, layers: Sequence[Layer], resolver: Resolver
) -> tuple[PresetLayer | None, list[Problem]]:
    """The layer of the selected preset; of several layers that select one, the last counts.

    Args:
        cls: the class of the whole config, for interpolations in the preset's own section.
        layers: files and overrides.
        resolver: finds the preset's Config class.

    Returns:
        The preset's layer, and what is wrong with its settings. There is no layer where no preset is selected, nor
        where its section is wrong in itself: its faults are found when the config that holds it is structured.
    """
    speaking = [layer for layer in layers if _choice(layer) is not ABSENT]
    if not speaking:
        return None, []
    merger = Merger(resolver, Interpolator(cls, layers, resolver))
    tree = merger.merge(
        _Run,
        [attrs.evolve(layer, tree={SECTION: {KEY: _choice(layer)}}) for layer in speaking],
    )
    config, faults = structure(tree)
    if faults or merger.problems or config.algorithm.preset is None:
        return None, []
    section = config.algorithm.preset
    try:
        settings = plain_settings(section)
    except ValueError as error:
        key = (*PATH, "path" if section.path else "name")
        problem = Problem(
            path=key,
            value=section.path or section.name,
            origin=merger.origins.get(key),
            text=str(error),
        )
        return None, [problem]
    layer = Layer(rank=PRESET_RANK, name=_title(section), tree=settings)
    return PresetLayer(layer=layer, section=section, named_by=speaking[-1]), []


def _choice(layer: Layer) -> Any:
    """What a layer says of the preset, null included, or ABSENT."""
    algorithm: Any = layer.tree.get(SECTION) if is_mapping(layer.tree) else None
    return algorithm.get(KEY, ABSENT) if is_mapping(algorithm) else ABSENT


def _title(section: PluginSection) -> str:
    if section.path:
        return f"preset '{section.attribute}' of {section.path}"
    return f"preset '{section.name}'"


def plain_settings(section: Any) -> Mapping[str, Any]:
    """The settings of a preset with that config, as plain containers.

    Raises:
        ValueError: they can't be made, or they are not what a layer may hold.
    """
    title = _title(section)
    if not isinstance(section, PresetSection):
        raise ValueError(f"{title} has a Config that does not extend PresetSection")  # noqa: TRY004 - a fault of the config's content
    try:
        settings = section.settings()
    except Exception as error:
        raise ValueError(
            f"{title} fails to make its settings: {type(error).__name__}: {error}"
        ) from error
    plain: dict[str, Any] = _plain(settings, (), title)
    if not is_mapping(plain):
        raise ValueError(f"{title} gives {plain!r} for its settings; they must be a mapping")
    if is_mapping(plain.get(SECTION)) and KEY in plain[SECTION]:
        raise ValueError(f"{title} sets {format_path(PATH)} itself; a preset selects no preset")
    return plain


def _plain(value: Any, path: KeyPath, title: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(child, (*path, str(key)), title) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(child, (*path, index), title) for index, child in enumerate(value)]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise ValueError(
        f"{title} sets {format_path(path)} to {value!r}; settings are plain: mappings, lists, text, numbers, "
        "true, false and null"
    )
