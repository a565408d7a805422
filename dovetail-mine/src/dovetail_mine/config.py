"""Settings of mine."""

from __future__ import annotations

import attrs
from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class MineConfig(PluginSection):
    """Settings of mine."""

    scale: float = 1.0
    """Multiplies every advantage."""
