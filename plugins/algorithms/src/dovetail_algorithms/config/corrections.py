"""Config classes of the rollout corrections: one set of keys, and a table of presets with different defaults.

This module imports nothing but config sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from dovetail.sections import ABOVE_ZERO, PluginSection, Validator

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

_AT_MOST_ONE: Validator = attrs.validators.optional(
    attrs.validators.and_(attrs.validators.gt(0), attrs.validators.le(1))
)
_AT_LEAST_ONE: Validator = attrs.validators.optional(attrs.validators.ge(1))


@attrs.frozen(kw_only=True)
class RejectionSection:
    """A criterion that excludes tokens from the loss."""

    by: CriterionName
    """Divergence to bound, in terms of the ratio r = π_train / π_rollout: k1 (−log r), k2 (½ (log r)²) or k3 (r − 1 − log r). The
    criterion bounds it for each token, or its sum, mean or worst value over a sample.
    """
    upper: float = attrs.field(validator=attrs.validators.gt(0))
    """Largest divergence that is kept; for k1 the largest ratio π_rollout / π_train, such as 2.0."""
    lower: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Smallest ratio π_rollout / π_train that is kept, for k1 only; absent: 1 / upper."""

    def __attrs_post_init__(self) -> None:
        if not self.by.endswith("k1"):
            if self.lower is not None:
                raise ValueError(
                    f"lower={self.lower:g} has no meaning for by={self.by}: this divergence is never negative and has only an upper bound; "
                    "leave `lower` out, or set `by` to a criterion whose name ends in k1"
                )
            return
        for bound, wrong in (("upper", self.upper < 1), ("lower", (self.lower or 0) > 1)):
            if wrong:
                raise ValueError(
                    f"{bound}={getattr(self, bound):g} would make by={self.by} reject tokens whose rollout and training "
                    "log-probabilities are equal (ratio 1); set lower below 1 and upper above 1, such as lower=0.5 and upper=2.0"
                )


@attrs.frozen(kw_only=True)
class RolloutCorrectionConfig(PluginSection):
    """Importance weights and token rejection, which correct for the difference between the rollout and the training policy. Every preset of
    a rollout correction has these keys, with its own defaults.
    """

    mode: Mode = "decoupled"
    """`decoupled`: three policies (rollout, old, current); `bypass`: the rollout policy is also the old one; `disabled`: no correction."""
    weights: WeightLevel | None = None
    """Importance weights: each token's ratio π_train / π_rollout, or the product of these ratios over its sample; None for no weights."""
    weight_upper: float | None = attrs.field(default=2.0, validator=_AT_LEAST_ONE)
    """Largest ratio that is used unchanged as a weight; None for no bound."""
    weight_lower: float | None = attrs.field(default=None, validator=_AT_MOST_ONE)
    """Smallest ratio that is used unchanged as a weight; None for no bound."""
    weight_outside: Outside = "truncate"
    """Weight of a ratio beyond a bound: the bound (`truncate`, TIS), or 0 (`zero`, IcePop)."""
    normalize_weights: bool = False
    """Scale the weights to a mean of 1 over the batch's tokens; not in bypass mode, which computes weights per micro-batch."""
    reject: tuple[RejectionSection, ...] = ()
    """Criteria, all of which a token must meet to keep its loss."""

    def __attrs_post_init__(self) -> None:
        if self.normalize_weights and self.weights is None:
            raise ValueError(
                "normalize_weights=true has nothing to normalise, because `weights` is null; set weights=token or weights=sequence"
            )
        if self.normalize_weights and self.mode == "bypass":
            raise ValueError(
                "normalize_weights=true is not possible with mode=bypass, in which each micro-batch computes its own weights; "
                "leave normalize_weights out, or set mode=decoupled"
            )


SEQUENCE = RejectionSection(by="seq_sum_k1", lower=0.5, upper=2.0)
"""Rejects samples by the product of π_rollout / π_train over their tokens."""
GEOMETRIC = RejectionSection(by="seq_mean_k1", lower=0.999, upper=1.001)
"""Rejects samples by the geometric mean of π_rollout / π_train over their tokens."""
K3 = RejectionSection(by="seq_mean_k3", upper=0.01)
"""Rejects samples by the mean of the divergence k3 over their tokens."""

_ICEPOP = {
    "weights": "token",
    "weight_lower": 0.5,
    "weight_upper": 5.0,
    "weight_outside": "zero",
}
_TOKEN, _SEQUENCE = {"weights": "token"}, {"weights": "sequence"}
_BYPASS = {"mode": "bypass"}
_GEOMETRIC, _K3 = {"reject": (GEOMETRIC,)}, {"reject": (K3,)}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": {**_SEQUENCE, "reject": (SEQUENCE,)},
    "decoupled_geo_rs": _GEOMETRIC,
    "decoupled_geo_rs_token_tis": {**_TOKEN, **_GEOMETRIC},
    "decoupled_geo_rs_seq_tis": {**_SEQUENCE, **_GEOMETRIC},
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_token_tis": {**_TOKEN, **_K3},
    "decoupled_k3_rs_seq_tis": {**_SEQUENCE, **_K3},
    "bypass_ppo_clip": _BYPASS,
    "bypass_ppo_clip_geo_rs": {**_BYPASS, **_GEOMETRIC},
    "bypass_ppo_clip_k3_rs": {**_BYPASS, **_K3},
    "bypass_pg_is": {**_BYPASS, **_SEQUENCE},
    "bypass_pg_token_icepop": {**_BYPASS, **_ICEPOP},
    "bypass_pg_geo_rs": {**_BYPASS, **_GEOMETRIC},
    "bypass_pg_geo_rs_token_tis": {**_BYPASS, **_TOKEN, **_GEOMETRIC},
    "bypass_pg_geo_rs_seq_tis": {**_BYPASS, **_SEQUENCE, **_GEOMETRIC},
    "disabled": {"mode": "disabled"},
}
"""For each preset, by its name in verl, the defaults that differ from `RolloutCorrectionConfig`."""

_MODES = {
    "decoupled": "Decoupled",
    "bypass_ppo_clip": "Bypass with a clipped loss, whose own ratio is r",
    "bypass_pg": "Bypass with the policy gradient, a loss without a ratio",
    "disabled": "No correction",
}
_WEIGHTS = {
    "token": "w_t = min(r_t, 2) (truncated importance sampling; Ionides, 2008)",
    "sequence": "w = min(Π_t r_t, 2) for each token of a sample",
    "zero": "w_t = r_t where 0.5 ≤ r_t ≤ 5, otherwise 0 (IcePop, arXiv 2510.18855)",
}
_KEEPS = {
    SEQUENCE: "only samples with 0.5 ≤ Π_t 1/r_t ≤ 2",
    GEOMETRIC: "only samples with 0.999 ≤ exp(mean_t −log r_t) ≤ 1.001 (the geometric mean)",
    K3: "only samples with mean_t (r_t − 1 − log r_t) ≤ 0.01 (k3)",
}


def _described(name: str, settings: Mapping[str, Any]) -> str:
    """Return the docstring of a preset's config class, a summary of its settings in one line."""
    mode = next(text for start, text in _MODES.items() if name.startswith(start))
    parts = [_KEEPS[section] for section in settings.get("reject", ())]
    if "weights" in settings:
        parts.append(_WEIGHTS[settings.get("weight_outside", settings["weights"])])
    return mode + (": " if parts else "") + "; ".join(parts) + "."


def _preset_config(name: str) -> type[RolloutCorrectionConfig]:
    """Make a subclass of `RolloutCorrectionConfig` with the defaults of a preset."""
    base = attrs.fields_dict(RolloutCorrectionConfig)
    body = {"__doc__": _described(name, PRESETS[name]), "__module__": __name__}
    cls = type(f"{name.title().replace('_', '')}Config", (RolloutCorrectionConfig,), body)
    defaults = {
        key: attrs.field(default=value, validator=base[key].validator, type=base[key].type)
        for key, value in PRESETS[name].items()
    }
    return attrs.frozen(kw_only=True, these=defaults)(cls)


CONFIGS: Mapping[str, type[RolloutCorrectionConfig]] = {
    name: _preset_config(name) for name in PRESETS
}
"""The config class of each preset, by its name."""
# The plugin manifest finds a config class by module and name, so the generated classes must be globals.
globals().update({cls.__name__: cls for cls in CONFIGS.values()})
