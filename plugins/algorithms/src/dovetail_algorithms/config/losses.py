"""Config classes of the policy losses. Nothing here imports more than the config sections."""

from __future__ import annotations

from typing import Any

import attrs

from dovetail.config.sections import PluginSection


def _absent_or_above_one(_: Any, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and not value > 1:
        raise ValueError(f"{attribute.name} must be above 1 or null, but is {value}")


@attrs.frozen(kw_only=True)
class PpoClipConfig(PluginSection):
    """PPO's clipped loss."""

    clip_low: float = attrs.field(
        default=0.2, validator=[attrs.validators.ge(0), attrs.validators.le(1)]
    )
    """How far below 1 the probability ratio may fall before its gradient is cut."""
    clip_high: float = attrs.field(default=0.2, validator=attrs.validators.ge(0))
    """How far above 1 it may rise."""
    dual_clip: float | None = attrs.field(default=3.0, validator=_absent_or_above_one)
    """Cap of the ratio where the advantage is negative; None for none."""


@attrs.frozen(kw_only=True)
class ReinforceConfig(PluginSection):
    """The plain policy gradient."""
