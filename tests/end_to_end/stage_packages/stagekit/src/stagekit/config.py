"""Settings of the stages and the trainers."""

from __future__ import annotations

import attrs

from dovetail.sections import PluginSection, TrainerSection


@attrs.frozen(kw_only=True)
class BonusConfig(PluginSection):
    """A bonus for responses that end by themselves."""

    amount: float = 0.1
    """What such a response gets."""


@attrs.frozen(kw_only=True)
class AddBonusConfig(PluginSection):
    """The bonus in the rewards."""


@attrs.frozen(kw_only=True)
class ClipAdvantagesConfig(PluginSection):
    """Clips advantages."""

    bound: float = attrs.field(default=1.0, validator=attrs.validators.gt(0))
    """Largest advantage, and the negative of the smallest."""


@attrs.frozen(kw_only=True)
class LengthLimitConfig(PluginSection):
    """Stops a run whose responses grow too long."""

    max_mean: float = attrs.field(default=1000.0, validator=attrs.validators.gt(0))
    """Largest mean length of a step's responses, in tokens."""


@attrs.frozen(kw_only=True)
class SparseConfig(TrainerSection):
    """Validates ever more rarely."""


@attrs.frozen(kw_only=True)
class OneStepOffConfig(TrainerSection):
    """Generates one step ahead."""
