"""No correction, said so in the config."""

from __future__ import annotations

from dovetail_algorithms.config.corrections import (
    DisabledConfig,
)
from dovetail_algorithms.corrections.by_ratio import CorrectionByRatio


class Disabled(CorrectionByRatio):
    """Nothing is weighed or rejected, and nothing is asked of the rollout."""

    name = "disabled"
    Config = DisabledConfig
