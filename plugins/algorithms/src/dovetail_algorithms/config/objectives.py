"""Config classes of the objectives. This module imports nothing but config sections."""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

from typing import Any, Literal

import attrs

from dovetail.sections import PluginSection, Validator, plugin_field

_POSITIVE: Validator = attrs.validators.gt(0)
_NOT_NEGATIVE: Validator = attrs.validators.ge(0)
_SHARE: Validator = [attrs.validators.ge(0), attrs.validators.le(1)]


@attrs.frozen(kw_only=True)
class PolicyConfig(PluginSection):
    """Policy loss, KL penalty and entropy bonus."""

    policy_loss: PluginSection = plugin_field("policy_loss", "ppo_clip")
    """Policy loss of each token."""
    loss_aggregation: PluginSection = plugin_field("loss_aggregation", "token_mean")
    """Aggregation of token losses into one number."""
    correction: PluginSection | None = plugin_field("rollout_correction", None)
    """Rollout correction (importance weights for the difference between rollout and training policy) that is computed in every micro-batch
    from the current log-probabilities; None for none."""
    kl: str | None = None
    """Estimator of a KL penalty to the reference policy (`k1`, `k2`, `k3`, …), weighted by the scalar `kl_coef`; None for no penalty."""
    entropy: bool = False
    """Compute the policy's entropy: for its metric, and for a bonus weighted by the scalar `entropy_coef`."""
    old_log_probs_from_current: bool = False
    """Use the current log-probabilities as the old ones, which is exact if each rollout has one update; saves a forward pass."""
    weighted: bool = False
    """Multiply each token's policy loss by its importance weight in the column `rollout_is_weights`, which a rollout correction computes
    before the update."""


@attrs.frozen(kw_only=True)
class ValueConfig(PluginSection):
    """The clipped value loss of PPO."""

    loss_aggregation: PluginSection = plugin_field("loss_aggregation", "token_mean")
    """Aggregation of token losses into one number."""
    clip: float | None = 0.5
    """How far a token's predicted value may move from the prediction before the update; null for no bound."""


@attrs.frozen(kw_only=True)
class NllConfig(PluginSection):
    """The negative log-likelihood of a dataset's responses."""

    loss_aggregation: PluginSection = plugin_field("loss_aggregation", "token_mean")
    """Aggregation of token losses into one number."""


_MARGIN_LOSSES = ("logistic", "hinge", "exo", "discopop")
"""Losses that depend only on the difference of a pair's two rewards, so that any f-divergence may define the rewards."""


def _fitting(config: Any, _attribute: Any, loss: str) -> None:
    """Check that the other settings fit the selected loss."""
    if loss == "exo" and not config.label_smoothing:
        raise ValueError(
            "loss 'exo' needs label_smoothing above 0; set label_smoothing=0.001, as in its paper"
        )
    if config.label_smoothing and loss not in ("logistic", "exo"):
        raise ValueError(
            f"loss {loss!r} does not support label_smoothing; leave label_smoothing out, or set loss to logistic or exo"
        )
    if config.robust and loss != "logistic":
        raise ValueError(
            f"loss {loss!r} does not support robust=true; leave `robust` out, or set loss=logistic"
        )
    if config.f_divergence != "reverse_kl" and loss not in _MARGIN_LOSSES:
        raise ValueError(
            f"loss {loss!r} is not defined for f_divergence={config.f_divergence}; set loss to one of {', '.join(_MARGIN_LOSSES)}"
        )


@attrs.frozen(kw_only=True)
class DpoConfig(PluginSection):
    """Direct preference optimization."""

    loss: Literal[
        "logistic", "hinge", "exo", "nca", "bco", "apo_zero", "apo_down", "sppo_hard", "discopop"
    ] = attrs.field(default="logistic", validator=_fitting)
    """The loss of a pair; the plugin's page has the formulas."""

    beta: float = attrs.field(default=0.1, validator=_POSITIVE)
    """Strength of the tie to the reference policy."""
    label_smoothing: float = attrs.field(
        default=0.0, validator=[attrs.validators.ge(0), attrs.validators.lt(0.5)]
    )
    """Share of the pairs that is assumed to have swapped labels; with `exo`, the target probability of the rejected response."""
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """Divergence from the reference policy for which the implicit reward is derived (f-DPO, arXiv 2309.16240)."""
    f_alpha: float = 0.5
    """α of the divergence `alpha`; 1 is `reverse_kl`."""
    ld_alpha: float = attrs.field(default=1.0, validator=_SHARE)
    """Weight of the tokens of a pair's longer response beyond the length of the shorter one (LD-DPO, arXiv 2409.06411)."""
    discopop_tau: float = attrs.field(default=0.05, validator=_POSITIVE)
    """Temperature of `discopop`."""
    robust: bool = False
    """Use the estimate of robust DPO instead of smoothed labels: its expectation is the loss on correct labels, if `label_smoothing` is the
    share of pairs with swapped labels."""
    nll_coef: float = attrs.field(default=0.0, validator=_NOT_NEGATIVE)
    """Weight of the chosen responses' negative log-likelihood per token, which keeps these responses from becoming less likely."""


@attrs.frozen(kw_only=True)
class IpoConfig(PluginSection):
    """Identity preference optimization."""

    beta: float = attrs.field(default=0.1, validator=_POSITIVE)
    """Strength of the tie to the reference policy: the margin is drawn to 1/(2 beta)."""


@attrs.frozen(kw_only=True)
class SimpoConfig(PluginSection):
    """Simple preference optimization."""

    beta: float = attrs.field(default=2.0, validator=_POSITIVE)
    """Scale of the mean log-probability."""
    gamma: float = attrs.field(default=1.0, validator=_NOT_NEGATIVE)
    """Margin by which the chosen response should be ahead."""


@attrs.frozen(kw_only=True)
class CpoConfig(PluginSection):
    """Contrastive preference optimization."""

    beta: float = attrs.field(default=0.1, validator=_POSITIVE)
    """Scale of the log-probabilities."""
    loss: Literal["logistic", "hinge"] = "logistic"
    """The loss of a pair."""
    nll_coef: float = attrs.field(default=1.0, validator=_NOT_NEGATIVE)
    """Weight of the chosen responses' negative log-likelihood per token."""


@attrs.frozen(kw_only=True)
class OrpoConfig(PluginSection):
    """Odds ratio preference optimization."""

    beta: float = attrs.field(default=0.1, validator=_POSITIVE)
    """Weight of the odds ratio beside the negative log-likelihood."""


@attrs.frozen(kw_only=True)
class KtoConfig(PluginSection):
    """Kahneman–Tversky optimization."""

    beta: float = attrs.field(default=0.1, validator=_POSITIVE)
    """Strength of the tie to the reference policy."""
    desirable_weight: float = attrs.field(default=1.0, validator=_NOT_NEGATIVE)
    """λ_D, the weight of a desirable response. If one kind is much more frequent, lower its weight until weight times count is about
    equal for both kinds.
    """
    undesirable_weight: float = attrs.field(default=1.0, validator=_NOT_NEGATIVE)
    """λ_U, the weight of an undesirable response."""


@attrs.frozen(kw_only=True)
class BradleyTerryConfig(PluginSection):
    """The Bradley–Terry loss of preference pairs."""

    margin: bool = False
    """Read from the dataset's column `margin` by how much the chosen response should score higher."""
    center_coef: float = attrs.field(default=0.0, validator=_NOT_NEGATIVE)
    """Weight of a term that pulls the mean score of a pair to 0, such as 0.01."""


@attrs.frozen(kw_only=True)
class ImplicitPrmConfig(PluginSection):
    """The cross-entropy of an implicit process reward model."""

    beta: float = attrs.field(default=0.05, validator=attrs.validators.gt(0))
    """β: reward per nat of log-ratio to the model's reference."""


@attrs.frozen(kw_only=True)
class SppoConfig(PluginSection):
    """The squared loss of self-play preference optimization."""

    eta: float = attrs.field(default=1e3, validator=attrs.validators.gt(0))
    """η: by how many nats the target log-ratio rises when the win rate rises from 0 to 1."""
