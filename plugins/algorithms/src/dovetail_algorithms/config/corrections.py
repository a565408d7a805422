"""Config classes of the rollout corrections: one set of keys, and a class a preset with defaults of its own.

Nothing here imports more than the config sections.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from dovetail.sections import ABOVE_ZERO, PluginSection

Mode = Literal["decoupled", "bypass", "disabled"]
WeightLevel = Literal["token", "sequence"]
Outside = Literal["truncate", "zero"]
CriterionName = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k1",
    "seq_max_k2",
    "seq_max_k3",
]

_AT_MOST_ONE: Any = attrs.validators.optional(
    attrs.validators.and_(attrs.validators.gt(0), attrs.validators.le(1))
)
_AT_LEAST_ONE: Any = attrs.validators.optional(attrs.validators.ge(1))


def _lower(default: float | None) -> Any:
    return attrs.field(default=default, validator=_AT_MOST_ONE)


def _upper(default: float | None) -> Any:
    return attrs.field(default=default, validator=_AT_LEAST_ONE)


@attrs.frozen(kw_only=True)
class RejectionSection:
    """One criterion by which tokens lose their loss."""

    by: CriterionName
    """Divergence (k1 −log r, k2 ½ (log r)², k3 r − 1 − log r) of each token, or the sum, mean or worst over a sample; r = π_train / π_rollout."""
    upper: float = attrs.field(validator=attrs.validators.gt(0))
    """Largest divergence that is kept; of k1 as a ratio of probabilities, π_rollout / π_train, such as 2.0."""
    lower: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Smallest ratio that is kept, of k1 alone; 1 / upper where absent."""

    def __attrs_post_init__(self) -> None:
        if not self.by.endswith("k1"):
            if self.lower is not None:
                raise ValueError(
                    f"lower is {self.lower:g}, but {self.by} is never negative and has only an upper bound; "
                    "leave lower out, or reject by k1"
                )
            return
        for bound, wrong in (("upper", self.upper < 1), ("lower", (self.lower or 0) > 1)):
            if wrong:
                raise ValueError(
                    f"{bound} is {getattr(self, bound):g}, so {self.by} would reject what does not differ at all: "
                    "k1 bounds are ratios around 1, such as lower 0.5 and upper 2.0"
                )


@attrs.frozen(kw_only=True)
class RolloutCorrectionConfig(PluginSection):
    """Importance weights and rejection; every preset has these keys, and defaults of its own."""

    mode: Mode = "decoupled"
    """Three policies, rollout, old and current (decoupled); two, the rollout policy being the old one (bypass); or no correction (disabled)."""
    weights: WeightLevel | None = None
    """Importance weights, by each token's ratio or by the product over its whole sample; None for none."""
    weight_upper: float | None = _upper(2.0)
    """Largest ratio that weighs as it is; None for any."""
    weight_lower: float | None = _lower(None)
    """Smallest ratio that weighs as it is; None for any."""
    weight_outside: Outside = "truncate"
    """What a ratio beyond a bound weighs: as much as the bound (TIS), or nothing (IcePop)."""
    normalize_weights: bool = False
    """Scale the weights to a mean of 1 over the batch's tokens; not in bypass mode, where every micro-batch has its own."""
    reject: tuple[RejectionSection, ...] = ()
    """Criteria that tokens must all meet to keep their loss."""

    def __attrs_post_init__(self) -> None:
        if self.normalize_weights and self.weights is None:
            raise ValueError(
                "normalize_weights is true, but there are no weights; set weights to token or sequence"
            )
        if self.normalize_weights and self.mode == "bypass":
            raise ValueError(
                "normalize_weights is true in mode bypass, where weights are made anew in every micro-batch and have "
                "no batch to be normalised over; leave it out, or use a decoupled correction"
            )


SEQUENCE = RejectionSection(by="seq_sum_k1", lower=0.5, upper=2.0)
"""A sample's ratio, the product over its tokens."""
GEOMETRIC = RejectionSection(by="seq_mean_k1", lower=0.999, upper=1.001)
"""The geometric mean of a sample's ratios."""
K3 = RejectionSection(by="seq_mean_k3", upper=0.01)
"""The mean of k3 over a sample."""


@attrs.frozen(kw_only=True)
class DecoupledTokenIsConfig(RolloutCorrectionConfig):
    """Decoupled: a weight a token, truncated at 2."""

    weights: WeightLevel | None = "token"


@attrs.frozen(kw_only=True)
class DecoupledSeqIsConfig(RolloutCorrectionConfig):
    """Decoupled: a weight a sample, truncated at 2."""

    weights: WeightLevel | None = "sequence"


@attrs.frozen(kw_only=True)
class DecoupledTokenIcepopConfig(RolloutCorrectionConfig):
    """Decoupled: a weight a token, 0 outside 0.5 to 5."""

    weights: WeightLevel | None = "token"
    weight_lower: float | None = _lower(0.5)
    weight_upper: float | None = _upper(5.0)
    weight_outside: Outside = "zero"


@attrs.frozen(kw_only=True)
class DecoupledSeqIsRsConfig(DecoupledSeqIsConfig):
    """Decoupled: a weight a sample, and no samples whose ratio is outside 0.5 to 2."""

    reject: tuple[RejectionSection, ...] = (SEQUENCE,)


@attrs.frozen(kw_only=True)
class DecoupledGeoRsConfig(RolloutCorrectionConfig):
    """Decoupled: no samples whose geometric mean ratio is outside 0.999 to 1.001."""

    reject: tuple[RejectionSection, ...] = (GEOMETRIC,)


@attrs.frozen(kw_only=True)
class DecoupledGeoRsTokenTisConfig(DecoupledGeoRsConfig):
    """Decoupled: geometric rejection, and a weight a token, truncated at 2."""

    weights: WeightLevel | None = "token"


@attrs.frozen(kw_only=True)
class DecoupledGeoRsSeqTisConfig(DecoupledGeoRsConfig):
    """Decoupled: geometric rejection, and a weight a sample, truncated at 2."""

    weights: WeightLevel | None = "sequence"


@attrs.frozen(kw_only=True)
class DecoupledK3RsConfig(RolloutCorrectionConfig):
    """Decoupled: no samples whose mean k3 is above 0.01."""

    reject: tuple[RejectionSection, ...] = (K3,)


@attrs.frozen(kw_only=True)
class DecoupledK3RsTokenTisConfig(DecoupledK3RsConfig):
    """Decoupled: rejection by k3, and a weight a token, truncated at 2."""

    weights: WeightLevel | None = "token"


@attrs.frozen(kw_only=True)
class DecoupledK3RsSeqTisConfig(DecoupledK3RsConfig):
    """Decoupled: rejection by k3, and a weight a sample, truncated at 2."""

    weights: WeightLevel | None = "sequence"


@attrs.frozen(kw_only=True)
class BypassPpoClipConfig(RolloutCorrectionConfig):
    """Bypass: a clipped loss whose ratio is over the rollout policy itself."""

    mode: Mode = "bypass"


@attrs.frozen(kw_only=True)
class BypassPpoClipGeoRsConfig(BypassPpoClipConfig):
    """Bypass: a clipped loss over the rollout policy, with geometric rejection."""

    reject: tuple[RejectionSection, ...] = (GEOMETRIC,)


@attrs.frozen(kw_only=True)
class BypassPpoClipK3RsConfig(BypassPpoClipConfig):
    """Bypass: a clipped loss over the rollout policy, with rejection by k3."""

    reject: tuple[RejectionSection, ...] = (K3,)


@attrs.frozen(kw_only=True)
class BypassPgIsConfig(RolloutCorrectionConfig):
    """Bypass: the policy gradient with a weight a sample, truncated at 2."""

    mode: Mode = "bypass"
    weights: WeightLevel | None = "sequence"


@attrs.frozen(kw_only=True)
class BypassPgTokenIcepopConfig(DecoupledTokenIcepopConfig):
    """Bypass: the policy gradient with a weight a token, 0 outside 0.5 to 5."""

    mode: Mode = "bypass"


@attrs.frozen(kw_only=True)
class BypassPgGeoRsConfig(DecoupledGeoRsConfig):
    """Bypass: the policy gradient with geometric rejection."""

    mode: Mode = "bypass"


@attrs.frozen(kw_only=True)
class BypassPgGeoRsTokenTisConfig(DecoupledGeoRsTokenTisConfig):
    """Bypass: the policy gradient with geometric rejection, and a weight a token, truncated at 2."""

    mode: Mode = "bypass"


@attrs.frozen(kw_only=True)
class BypassPgGeoRsSeqTisConfig(DecoupledGeoRsSeqTisConfig):
    """Bypass: the policy gradient with geometric rejection, and a weight a sample, truncated at 2."""

    mode: Mode = "bypass"


@attrs.frozen(kw_only=True)
class DisabledConfig(RolloutCorrectionConfig):
    """No correction."""

    mode: Mode = "disabled"
