"""Settings of the trainers."""

from __future__ import annotations

import attrs

from dovetail.sections import TrainerSection


@attrs.frozen(kw_only=True)
class OnPolicyConfig(TrainerSection):
    """On-policy training."""
