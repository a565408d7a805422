"""Config classes of the advantage estimators. This module imports nothing but config sections."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from dovetail.sections import PluginSection, Validator

_SHARE: Validator = [attrs.validators.ge(0), attrs.validators.le(1)]
"""Validators of a discount γ or a weight λ: between 0 and 1, both included."""


@attrs.frozen(kw_only=True)
class GaeConfig(PluginSection):
    """Generalised advantage estimation from a value model."""

    gamma: float = attrs.field(default=1.0, validator=_SHARE)
    """Discount per token."""
    turn_gamma: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.and_(*_SHARE))
    )
    """Discount from one turn of an episode to the next; absent: `gamma`."""
    lam: float = attrs.field(default=1.0, validator=_SHARE)
    """Weight λ of later temporal differences: 0 trusts the value model, 1 the rewards."""
    whiten: bool = True
    """Bring the advantages of the batch to mean 0 and variance 1; returns stay as they are."""


@attrs.frozen(kw_only=True)
class BiLevelGaeConfig(PluginSection):
    """Generalised advantage estimation over turns, and within each turn over tokens."""

    gamma: float = attrs.field(default=1.0, validator=_SHARE)
    """Discount per token, within a turn."""
    lam: float = attrs.field(default=1.0, validator=_SHARE)
    """Weight λ of later temporal differences, within a turn."""
    turn_gamma: float = attrs.field(default=0.95, validator=_SHARE)
    """Discount per turn."""
    turn_lam: float = attrs.field(default=1.0, validator=_SHARE)
    """Weight λ of later turns' temporal differences."""
    whiten: bool = True
    """Bring the advantages of the batch to mean 0 and variance 1; returns stay as they are."""


@attrs.frozen(kw_only=True)
class MtGrpoConfig(PluginSection):
    """The last turn's reward relative to the group; earlier turns add their own reward relative to the turns at the same position in
    the group's other episodes.
    """

    turn_weight: float = attrs.field(default=1.0, validator=attrs.validators.ge(0))
    """Weight λ of the advantage from a turn's own reward; the advantage from the last turn's reward has weight 1."""
    norm_by_std: bool = True
    """Divide by the standard deviation of the compared rewards or returns."""


@attrs.frozen(kw_only=True)
class GigpoConfig(PluginSection):
    """Episode rewards relative to their group, plus the discounted return of each turn relative to turns that began in the same state."""

    step_weight: float = attrs.field(default=1.0, validator=attrs.validators.ge(0))
    """Weight ω of a turn's advantage relative to turns that began in the same state."""
    gamma: float = attrs.field(default=0.95, validator=_SHARE)
    """Discount per turn."""
    norm_by_std: bool = True
    """Divide by the standard deviation of the compared rewards or returns."""


@attrs.frozen(kw_only=True)
class GrpoConfig(PluginSection):
    """Rewards relative to their group's mean, in units of the group's standard deviation."""

    norm_by_std: bool = True
    """Divide by the group's standard deviation; otherwise a group's weight grows with its spread."""
    singleton: Literal["zero", "raw"] = "zero"
    """Advantage of a sample that is alone in its group: zero, or its raw reward."""


@attrs.frozen(kw_only=True)
class ReinforcePlusPlusConfig(PluginSection):
    """Discounted returns, whitened over the batch."""

    gamma: float = attrs.field(default=1.0, validator=_SHARE)
    """Discount per token."""
    turn_gamma: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.and_(*_SHARE))
    )
    """Discount from one turn of an episode to the next; absent: `gamma`."""


@attrs.frozen(kw_only=True)
class GrpoPasskConfig(PluginSection):
    """Only the best sample of a group has an advantage: its lead over the second best."""

    norm_by_std: bool = False
    """Divide the lead by the group's standard deviation of rewards."""


def _as_many_as_components(config: Any, _attribute: Any, weights: tuple[float, ...]) -> None:
    """Check that there are as many weights as `components`, since weights are assigned to components by position."""
    if weights and len(weights) != len(config.components):
        names = ", ".join(config.components) or "none"
        raise ValueError(
            f"`weights` has {len(weights)} value(s), but `components` has {len(config.components)} "
            f"({names}); name every component in `components`, and give one weight for each"
        )


@attrs.frozen(kw_only=True)
class GdpoConfig(PluginSection):
    """Reward components, each normalised in its group, then summed and whitened."""

    components: tuple[str, ...] = ()
    """Names of the reward components to use; by default all that the samples have, in sorted order."""
    weights: tuple[float, ...] = attrs.field(default=(), validator=_as_many_as_components)
    """Weight of each of the `components`, in their order; by default 1 each."""
    norm_by_std: bool = True
    """Divide each component by its standard deviation in the group."""


@attrs.frozen(kw_only=True)
class PrimeConfig(PluginSection):
    """Implicit process rewards and outcomes (the samples' scores), each relative to the group's other samples."""

    gamma: float = attrs.field(default=1.0, validator=_SHARE)
    """Discount per token of the process rewards."""


@attrs.frozen(kw_only=True)
class WinRateConfig(PluginSection):
    """A sample's win rate against the samples of its group."""

    comparison: Literal["wins", "bradley_terry"] = "wins"
    """Probability that one sample is preferred to another. wins: 1 for the higher score, ½ for equal scores; bradley_terry: σ of the
    difference of the scores.
    """
