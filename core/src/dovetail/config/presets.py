"""`algorithm.preset`: a preset's settings become a layer directly below the layer that names the preset."""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from dovetail.config.interpolate import Interpolator
from dovetail.config.keys import ABSENT, KeyPath, format_path, leaves, value_at
from dovetail.config.layers import ConfigLayer, is_mapping
from dovetail.config.merge import Merger
from dovetail.config.plugin_choice import Resolver
from dovetail.config.problems import ConfigProblem, show_value
from dovetail.config.serialise import plain_value
from dovetail.config.structure import structure
from dovetail.sections import EpisodeSection, TrainerSection
from dovetail.sections.fields import SELECTORS, PluginSection, PresetSection, plugin_field

SECTION, KEY = PATH = ("algorithm", "preset")
"""Key path at which a config selects a preset."""


@attrs.frozen(kw_only=True)
class _Algorithm:
    preset: PluginSection | None = plugin_field("preset", None)


@attrs.frozen(kw_only=True)
class _Run:
    """The part of a config that the choice of a preset needs."""

    algorithm: _Algorithm = attrs.field(factory=_Algorithm)


@attrs.frozen(kw_only=True)
class PresetLayer:
    """The config layer with the settings of the selected preset."""

    layer: ConfigLayer
    section: PresetSection
    """The preset's own config, from which its settings were made."""
    named_by: ConfigLayer
    """The last layer that names the preset."""
    altered_by: ConfigLayer | None
    """The last layer after `named_by` that sets fields of the preset's own config; None if no layer does."""
    left_over: tuple[KeyPath, ...] = ()
    """Keys of an earlier layer that the user may expect this preset to set: the preset that it replaces sets them, but neither this preset
    nor a later layer does. Their earlier values stay; a warning names these keys."""

    def among(self, layers: Sequence[ConfigLayer]) -> list[ConfigLayer]:
        """Return all layers, with the preset's layer inserted directly below the layer that names the preset.

        The naming layer and later layers win over the preset; the preset wins over earlier layers.
        """
        rank = self.named_by.rank
        below = [layer for layer in layers if layer.rank < rank]
        above = [attrs.evolve(layer, rank=layer.rank + 1) for layer in layers if layer.rank >= rank]
        return [*below, self.layer, *above]

    def problems(self, section: Any) -> list[ConfigProblem]:
        """Return a problem if the preset's settings change the preset's own section through `${…}`.

        `section` is that section, resolved again with the preset's settings in the config.
        """
        text = "a key of this section refers to a key that the preset sets; give it a value, or refer to another key"
        return [] if section in (None, self.section) else [ConfigProblem(path=PATH, text=text)]

    def warnings(self, tree: Mapping[str, Any], origins: Mapping[KeyPath, str]) -> Iterator[str]:
        """Yield a warning for each setting of the preset that has no effect.

        Args:
            tree: the merged config.
            origins: the layer of each key that a layer sets.
        """
        if not self.named_by.raw:
            yield from self._overruled(tree, origins)
        if self.left_over:
            keys = ", ".join(format_path(key) for key in self.left_over)
            yield (
                f"{self.layer.name} ({self.named_by.at(PATH)}) replaces another preset, but does not set {keys}: "
                "the values of earlier layers stay; set each key whose earlier value you do not want"
            )
        hidden = bool(self.layer.tree) and self.layer.name not in origins.values()
        if hidden and self.altered_by is not None:
            yield (
                f"{format_path(PATH)} ({self.altered_by.name}): these settings have no effect, since {self.named_by.name}, "
                f"which names {self.layer.name}, and later layers give every key that the preset sets; "
                f"name the preset again beside these settings, or set the keys directly"
            )

    def _overruled(self, tree: Mapping[str, Any], origins: Mapping[KeyPath, str]) -> Iterator[str]:
        """Yield a warning for each plugin of the preset that is replaced in the same file that names the preset."""
        for part in ("advantage", "policy_loss"):
            preset = value_at(self.layer.tree, (SECTION, part))
            preset = preset.get("name") if is_mapping(preset) else preset
            for selector in ("name", "path"):
                key = (SECTION, part, selector)
                value, origin = value_at(tree, key), self.named_by.at(key)
                if preset not in (None, ABSENT, value) and origins.get(key) == origin:
                    yield (
                        f"{format_path(key)} = {show_value(value)} ({origin}): overrides {self.layer.name} "
                        f"({self.named_by.at(PATH)}), which sets {show_value(preset)}; leave the key out to use "
                        "the preset's value, or remove the preset if you do not want it"
                    )


def preset_layer(
    cls: type, layers: Sequence[ConfigLayer], resolver: Resolver
) -> tuple[PresetLayer | None, list[ConfigProblem]]:
    """Return the layer of the selected preset; if several layers select a preset, the last one counts.

    Args:
        cls: the class of the whole config, for interpolations in the preset's own section.
        layers: files and overrides.
        resolver: the function that finds the preset's Config class.

    Returns:
        The preset's layer, and the problems of its settings. The layer is None if no preset is selected or the preset's section is invalid;
        problems of an invalid section are reported later, with the whole config.
    """
    choices = [
        (layer, choice) for layer in layers if (choice := value_at(layer.tree, PATH)) is not ABSENT
    ]
    naming = [layer for layer, choice in choices if _names(choice)]
    if not naming:
        return None, []
    merger = Merger(resolver, Interpolator(cls, layers, resolver))
    trees = [attrs.evolve(layer, tree={SECTION: {KEY: choice}}) for layer, choice in choices]
    config, faults = structure(merger.merge(_Run, trees))
    if faults or merger.problems or config.algorithm.preset is None:
        return None, []
    section, named_by = config.algorithm.preset, naming[-1]
    try:
        settings = plain_settings(section)
    except ValueError as error:
        key = (*PATH, "path" if section.path else "name")
        value, origin = section.path or section.name, merger.origins.get(key)
        return None, [ConfigProblem(path=key, value=value, origin=origin, text=str(error))]
    layer = ConfigLayer(rank=named_by.rank, name=_title(section), tree=settings, is_preset=True)
    later = [layer for layer, _ in choices if layer.rank > named_by.rank]
    before = [given for given in layers if given.rank < named_by.rank]
    earlier, _ = preset_layer(cls, before, resolver)
    left_over: tuple[KeyPath, ...] = ()
    if earlier and earlier.layer.name != layer.name:
        since = [layer, *layers[len(before) :]]
        keys = dict.fromkeys(path[:2] for path, _ in leaves(earlier.layer.tree))
        left_over = tuple(key for key in keys if _gives(before, key) and not _gives(since, key))
    preset = PresetLayer(
        layer=layer,
        section=section,
        named_by=named_by,
        altered_by=later[-1] if later else None,
        left_over=left_over,
    )
    return preset, []


def _gives(layers: Sequence[ConfigLayer], path: KeyPath) -> bool:
    return any(value_at(layer.tree, path) is not ABSENT for layer in layers)


def _names(choice: Any) -> bool:
    """Return whether a layer's value of `algorithm.preset` selects a preset, and does not only set keys of the preset's config."""
    if is_mapping(choice):
        return any(choice.get(selector) is not None for selector in SELECTORS)
    return isinstance(choice, str)


def _title(section: PluginSection) -> str:
    if section.path:
        return f"preset '{section.attribute}' of {section.path}"
    return f"preset '{section.name}'"


def plain_settings(section: Any) -> Mapping[str, Any]:
    """Return the settings of a preset, built from its config section, as plain containers.

    Raises:
        ValueError: `settings` failed, or returned values that a layer can't contain.
    """
    title = _title(section)
    if not isinstance(section, PresetSection):
        raise ValueError(  # noqa: TRY004 - a fault of the config's content
            f"the Config of {title} must extend dovetail.sections.PresetSection"
        )
    return settings_of(section, title)


def settings_of(
    section: PresetSection | TrainerSection | EpisodeSection, title: str
) -> Mapping[str, Any]:
    """Return the settings of other keys that a section implies, as plain containers.

    Args:
        section: the section with the method `settings`.
        title: the section's name in messages.

    Raises:
        ValueError: `settings` failed, or returned values that a layer can't contain.
    """
    try:
        settings = section.settings()
    except Exception as error:
        raise ValueError(f"`settings` of {title} raised {type(error).__name__}: {error}") from error
    if not is_mapping(settings):
        raise ValueError(f"`settings` of {title} returned {settings!r}; expected a mapping")
    plain = (str, int, float, bool, Mapping, list, tuple, type(None))
    odd = next((leaf for leaf in leaves(settings) if not isinstance(leaf[1], plain)), None)
    if odd:
        raise ValueError(
            f"{title} sets {format_path(odd[0])} to {odd[1]!r}; expected mappings, lists, text, numbers, "
            "true, false or null"
        )
    if value_at(settings, PATH) is not ABSENT:
        raise ValueError(
            f"{title} sets {format_path(PATH)}; a plugin's `settings` can't select a preset: remove the key"
        )
    return dict(plain_value(settings, verbatim=True))
