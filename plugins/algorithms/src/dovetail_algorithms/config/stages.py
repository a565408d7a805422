"""Config classes of the stages. This module imports nothing but config sections."""

from __future__ import annotations

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class ImplicitProcessRewardsConfig(PluginSection):
    """Rewards of single tokens by an implicit process reward model."""

    role: str = "prm"
    """The role of the process reward model, whose objective is `implicit_prm`."""
    reference: str | None = None
    """The role that is the frozen reference of the process reward model. Absent: the model without its adapter if it has one, else the
    run's reference policy, which must have the same path as the process reward model.
    """
