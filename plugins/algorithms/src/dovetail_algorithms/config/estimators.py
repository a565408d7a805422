"""Config classes of the advantage estimators. Nothing here imports more than the config sections."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.config.sections import PluginSection


@attrs.frozen(kw_only=True)
class GrpoConfig(PluginSection):
    """Rewards relative to their group, in units of its standard deviation."""

    norm_by_std: bool = True
    """Divide by the group's standard deviation; without it every group weighs by its spread."""
    singleton: Literal["zero", "raw"] = "zero"
    """Advantage of a sample that is alone in its group: zero, or its reward as it is."""


@attrs.frozen(kw_only=True)
class DrGrpoConfig(PluginSection):
    """Rewards relative to their group's mean."""


@attrs.frozen(kw_only=True)
class RlooConfig(PluginSection):
    """Rewards relative to the mean of the group's other samples."""


@attrs.frozen(kw_only=True)
class ReinforcePlusPlusConfig(PluginSection):
    """Discounted returns, whitened over the batch."""

    gamma: float = attrs.field(
        default=1.0, validator=[attrs.validators.ge(0), attrs.validators.le(1)]
    )
    """Discount a token."""
