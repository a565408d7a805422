"""Config classes of KL controllers and loss aggregations."""

from __future__ import annotations

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class AdaptiveKlConfig(PluginSection):
    """A KL weight that rises while the policy is further from the reference than its target, and falls while it is nearer."""

    target: float = attrs.field(default=0.1, validator=attrs.validators.gt(0))
    """Wanted mean KL in nats a token."""
    horizon: int = attrs.field(default=10_000, validator=attrs.validators.ge(1))
    """Samples over which the weight moves by at most a fifth."""


@attrs.frozen(kw_only=True)
class SeqMeanTokenSumNormConfig(PluginSection):
    """Mean over sequences of the sum over each one's tokens, divided by a constant length."""

    length: int = attrs.field(default=1024, validator=attrs.validators.ge(1))
    """The constant in tokens; the longest response allowed is customary: `${data.max_response_length}`."""
