"""Preset: a published combination of settings under one name."""

from __future__ import annotations

from typing import ClassVar

from dovetail.interfaces.plugin import Plugin
from dovetail.sections import PluginSection, PresetSection


class Preset(Plugin):
    """A published combination of settings: estimator, loss, aggregation, KL, filters.

    `Config.settings()` returns the settings, so that reading a config that names the preset imports only the `Config` class. The settings
    form a config layer directly below the layer that names the preset, and that layer overrides them.
    """

    Config: ClassVar[type[PluginSection]] = PresetSection
