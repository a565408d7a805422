"""Config classes of the stages. Nothing here imports more than the config sections."""

from __future__ import annotations

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class ImplicitProcessRewardsConfig(PluginSection):
    """Rewards of single tokens by an implicit process reward model."""

    role: str = "prm"
    """The role of the model, which has the objective `implicit_prm`."""
    reference: str | None = None
    """The role of its frozen reference. Absent: the model below its adapter where it has one, else the run's reference policy, whose path must then
    be the model's."""
