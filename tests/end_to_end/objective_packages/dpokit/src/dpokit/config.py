"""Settings of the objective."""

from __future__ import annotations

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class DpoConfig(PluginSection):
    """Settings of DPO."""

    beta: float = attrs.field(default=0.1, validator=attrs.validators.gt(0))
    """Strength of the tie to the reference policy."""
