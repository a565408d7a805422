"""Config classes of KL controllers and loss aggregations."""

from __future__ import annotations

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class AdaptiveKlConfig(PluginSection):
    """A KL weight that rises while the KL to the reference is above its target, and falls while the KL is below."""

    target: float = attrs.field(default=0.1, validator=attrs.validators.gt(0))
    """Target mean KL, in nats a token."""
    horizon: int = attrs.field(default=10_000, validator=attrs.validators.ge(1))
    """Number of samples over which the weight changes by at most a fifth."""


@attrs.frozen(kw_only=True)
class SeqMeanTokenSumNormConfig(PluginSection):
    """Mean over sequences of each sequence's token sum, divided by a constant length."""

    length: int = attrs.field(default=1024, validator=attrs.validators.ge(1))
    """The constant, in tokens; usually the longest response allowed, `${data.max_response_length}`."""
