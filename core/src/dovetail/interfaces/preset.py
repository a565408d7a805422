"""Preset: a published combination of settings under one name."""

from __future__ import annotations

from typing import ClassVar

from dovetail.interfaces.plugin import Plugin
from dovetail.sections import PluginSection, PresetSection


class Preset(Plugin):
    """A combination of a paper: estimator, loss, aggregation, KL, filters.

    `Config.settings()` returns its settings, so that reading a config that names the preset imports nothing else. They become a layer
    directly below the one that names the preset.
    """

    Config: ClassVar[type[PluginSection]] = PresetSection
