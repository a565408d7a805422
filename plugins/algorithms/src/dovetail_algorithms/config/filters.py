"""Config classes of the sample filters. This module imports nothing but config sections."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class EqualRewardsConfig(PluginSection):
    """Leaves out groups whose rewards are all equal."""

    component: str | None = None
    """Reward component to compare; absent: the whole reward."""
    tolerance: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    """Largest difference of rewards that count as equal."""


@attrs.frozen(kw_only=True)
class ScoreRangeConfig(PluginSection):
    """Leaves out groups or samples that are too hard or too easy."""

    lower: float | None = None
    """Smallest mean reward that is kept; None for no bound."""
    upper: float | None = None
    """Largest mean reward that is kept; None for no bound."""
    unit: Literal["group", "sample"] = "group"
    """Unit that is left out: a group by its mean reward, or each sample by its own reward."""
    component: str | None = None
    """Reward component to judge by; absent: the whole reward."""

    def __attrs_post_init__(self) -> None:
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(
                f"lower={self.lower} is above upper={self.upper}, so the filter would keep nothing; expected lower ≤ upper"
            )
