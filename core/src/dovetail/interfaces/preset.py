"""Preset: a published combination of settings under one name."""

from __future__ import annotations

from typing import ClassVar

from dovetail.interfaces.plugin import Plugin
from dovetail.sections import PluginSection, PresetSection


class Preset(Plugin):
    """What a paper combines: estimator, loss, aggregation, KL, filters.

    Its settings come from its Config, so that any config that names it can be read without importing more:
    `Config.settings()` returns them, and they become a layer directly below the one that names the preset.
    """

    Config: ClassVar[type[PluginSection]] = PresetSection
