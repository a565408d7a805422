"""Config classes of the policy losses. This module imports nothing but config sections."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from dovetail.sections import PluginSection, Validator

_SHARE: Validator = [attrs.validators.ge(0), attrs.validators.le(1)]
_NOT_NEGATIVE: Validator = attrs.validators.ge(0)
_POSITIVE: Validator = attrs.validators.gt(0)


def _absent_or_above_one(_: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and not value > 1:
        raise ValueError(f"{attribute.name} is {value}; expected a number above 1, or null")


def _above_cov_low(config: Any, _: attrs.Attribute[Any], value: float) -> None:
    if not value > config.cov_low:
        raise ValueError(f"cov_high is {value}; expected a number above cov_low={config.cov_low}")


@attrs.frozen(kw_only=True)
class PpoClipConfig(PluginSection):
    """PPO's clipped loss."""

    clip_low: float = attrs.field(default=0.2, validator=_SHARE)
    """How far below 1 the probability ratio may fall before its gradient is cut."""
    clip_high: float = attrs.field(default=0.2, validator=_NOT_NEGATIVE)
    """How far above 1 the probability ratio may rise before its gradient is cut."""
    dual_clip: float | None = attrs.field(default=3.0, validator=_absent_or_above_one)
    """Cap of the ratio if the advantage is negative (dual clip); None for no cap, as in the papers of PPO, GRPO and DAPO."""


@attrs.frozen(kw_only=True)
class GspoConfig(PluginSection):
    """One clipped ratio per sequence."""

    clip_low: float = attrs.field(default=3e-4, validator=_SHARE)
    """How far below 1 the sequence's ratio may fall before its gradient is cut."""
    clip_high: float = attrs.field(default=4e-4, validator=_NOT_NEGATIVE)
    """How far above 1 the sequence's ratio may rise before its gradient is cut."""


@attrs.frozen(kw_only=True)
class CispoConfig(PluginSection):
    """The clipped ratio as a weight of the policy gradient."""

    clip_low: float | None = attrs.field(default=None, validator=attrs.validators.optional(_SHARE))
    """How far below 1 a token's weight may fall; None for no lower bound, as in the paper."""
    clip_high: float = attrs.field(default=4.0, validator=_NOT_NEGATIVE)
    """How far above 1 a token's weight may rise."""


@attrs.frozen(kw_only=True)
class SapoConfig(PluginSection):
    """A soft gate on the ratio in place of PPO's clip."""

    tau_positive: float = attrs.field(default=1.0, validator=_POSITIVE)
    """Steepness of the gate around a ratio of 1 if the advantage is positive."""
    tau_negative: float = attrs.field(default=1.05, validator=_POSITIVE)
    """Steepness of the gate around a ratio of 1 if the advantage is 0 or negative."""


@attrs.frozen(kw_only=True)
class GmpoConfig(PluginSection):
    """The loss of GMPO: the geometric mean of a sequence's clipped ratios."""

    clip_low: float = attrs.field(default=0.4, validator=_NOT_NEGATIVE)
    """How far below 0 a token's log-ratio may fall if the advantage is negative, in nats."""
    clip_high: float = attrs.field(default=0.4, validator=_NOT_NEGATIVE)
    """How far above 0 a token's log-ratio may rise if the advantage is not negative, in nats."""


@attrs.frozen(kw_only=True)
class ClipCovConfig(PluginSection):
    """PPO's loss without the gradient of a few tokens with a high covariance of advantage and log-probability."""

    clip_low: float = attrs.field(default=0.2, validator=_SHARE)
    """How far below 1 the probability ratio may fall before its gradient is cut."""
    clip_high: float = attrs.field(default=0.2, validator=_NOT_NEGATIVE)
    """How far above 1 the probability ratio may rise before its gradient is cut."""
    share: float = attrs.field(default=2e-4, validator=_SHARE)
    """Share of the mini-batch's tokens that lose their gradient; rounded down, but at least one token unless 0."""
    cov_low: float = 1.0
    """Only tokens with a covariance above this lose their gradient."""
    cov_high: float = attrs.field(default=5.0, validator=_above_cov_low)
    """Only tokens with a covariance below this lose their gradient."""


@attrs.frozen(kw_only=True)
class KlCovConfig(PluginSection):
    """A KL penalty on the few tokens with the highest covariance of advantage and log-probability."""

    share: float = attrs.field(default=2e-4, validator=_SHARE)
    """Share of the mini-batch's tokens that are penalised; rounded down, but at least one token unless 0."""
    coef: float = attrs.field(default=1.0, validator=_NOT_NEGATIVE)
    """Weight of the penalty |log π − log π_old| on the chosen tokens."""


@attrs.frozen(kw_only=True)
class DppoConfig(PluginSection):
    """A trust region on the divergence of token probabilities, in place of PPO's clip."""

    divergence: Literal["total_variation", "binary_kl"] = "total_variation"
    """Measure of the distance between a token's probability under the current policy and under the rollout policy."""
    threshold: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(_POSITIVE)
    )
    """Largest divergence at which a token keeps its gradient; None for the paper's 0.15 (total_variation) or 0.05 (binary_kl)."""


@attrs.frozen(kw_only=True)
class DroConfig(PluginSection):
    """A quadratic penalty on the log-ratio in place of PPO's clip."""

    beta: float = attrs.field(default=1.0, validator=_NOT_NEGATIVE)
    """Weight of the squared log-ratio to the old policy."""
