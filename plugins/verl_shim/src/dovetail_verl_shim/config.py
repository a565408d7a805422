"""Config class of the dataset source. This module imports nothing but config sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class VerlDatasetConfig(PluginSection):
    """Selects a dataset class that was written for verl."""

    file: str
    """Python file that defines the class (verl's `data.custom_cls.path`); the file is executed."""
    class_name: str
    """Name of the class in `file` (verl's `data.custom_cls.name`)."""
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    """The settings that the class reads from verl's config section `data`, such as `{prompt_key: question}`."""
