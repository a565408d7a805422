"""The `algorithm` section: the parts of the algorithm, each a plugin or a number. This module does not import torch."""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections.fields import NOT_NEGATIVE, PluginSection, plugin_field


@attrs.frozen(kw_only=True)
class KlInLossSection:
    """A KL penalty to the reference policy inside the loss."""

    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """KL estimator (joschu.net/blog/kl-approx.html); with `+`, the gradient is that of k2."""
    coef: float = attrs.field(default=0.001, validator=attrs.validators.ge(0))
    """Weight of the penalty."""
    controller: PluginSection = plugin_field("kl_controller", "fixed")
    """The controller of the penalty's weight during the run."""


@attrs.frozen(kw_only=True)
class KlInRewardSection:
    """A KL penalty to the reference policy, subtracted from each token's reward before advantages are estimated."""

    estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """KL estimator (joschu.net/blog/kl-approx.html)."""
    coef: float = attrs.field(default=0.001, validator=attrs.validators.ge(0))
    """Weight of the penalty."""
    controller: PluginSection = plugin_field("kl_controller", "fixed")
    """The controller of the penalty's weight during the run."""


@attrs.frozen(kw_only=True)
class KlSection:
    """KL penalties to the reference policy, in the loss or in the reward."""

    in_loss: KlInLossSection | None = None
    """A penalty in the loss; None for none."""
    in_reward: KlInRewardSection | None = None
    """A penalty in the reward; None for none."""


@attrs.frozen(kw_only=True)
class EntropySection:
    """The entropy bonus."""

    coef: float = 0.0
    """Weight of an entropy bonus in the loss."""
    measure: bool = True
    """Report the policy's entropy as `actor/entropy`."""


@attrs.frozen(kw_only=True)
class OverlongPenaltySection:
    """DAPO's soft penalty on long responses (arXiv 2503.14476, eq. 13), added to the reward.

    The penalty is min(−(length − (max_response_length − buffer)) / buffer · factor, 0), where length counts the response's tokens.
    """

    buffer: int = attrs.field(default=4096, validator=attrs.validators.ge(1))
    """Tokens before data.max_response_length in which the penalty grows from 0 to `factor`."""
    factor: float = attrs.field(default=1.0, validator=attrs.validators.ge(0))
    """Penalty of a response that reaches data.max_response_length."""


@attrs.frozen(kw_only=True)
class LogProbCheckSection:
    """The check that rollout and trainer compute the same log-probabilities: its frequency and tolerances."""

    every: int = attrs.field(default=10, validator=attrs.validators.ge(0))
    """Steps between measurements, beginning with the first step; 0 measures only if the log-probabilities are computed anyway."""
    samples: int = attrs.field(default=64, validator=attrs.validators.ge(1))
    """Number of samples that the trainer scores for a measurement, if it does not score all samples anyway."""
    warn_above: float = attrs.field(default=0.01, validator=attrs.validators.ge(0))
    """Mean difference between a token's probabilities in rollout and trainer above which the run warns."""
    stop_above: float | None = attrs.field(default=0.1, validator=NOT_NEGATIVE)
    """Mean difference, measured as for `warn_above`, above which the run stops before any weight changes; None for never."""


@attrs.frozen(kw_only=True)
class AlgorithmSection:
    """The algorithm: estimator, losses, filters, penalties, stages."""

    preset: PluginSection | None = plugin_field("preset", None)
    """A published combination of settings for this and other sections; keys beside its name or in later config layers override it."""
    advantage: PluginSection = plugin_field("advantage", "grpo")
    """The advantage estimator."""
    policy_loss: PluginSection = plugin_field("policy_loss", "ppo_clip")
    """The loss of each token."""
    loss_aggregation: PluginSection = plugin_field("loss_aggregation", "token_mean")
    """The aggregation of token losses into one number."""
    kl: KlSection = attrs.field(factory=KlSection)
    """Penalty towards the reference policy."""
    entropy: EntropySection = attrs.field(factory=EntropySection)
    """Entropy bonus and measurement."""
    sample_filters: tuple[PluginSection, ...] = plugin_field(
        "sample_filter", None, collection="list"
    )
    """Filters that leave samples out of training, in order."""
    max_generation_rounds: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Maximum rounds of generation in a step, which replace groups that a filter left out; 1 replaces none."""
    stages: tuple[PluginSection, ...] = plugin_field("stage", None, collection="list")
    """Further stages of a step. Each runs in its phase after the stages of `stage_set`, as far as its `before` and `after` allow."""
    stage_set: PluginSection = plugin_field("stage_set", "standard")
    """The plugin that names a step's stages in order, besides those in `stages`. Stages that the config does not need are left out."""
    overlong_penalty: OverlongPenaltySection | None = None
    """A penalty on responses that come near the length limit; None for none."""
    rollout_correction: PluginSection | None = plugin_field("rollout_correction", None)
    """The correction for a rollout policy that differs from the training policy; None for none."""
    logprob_check: LogProbCheckSection = attrs.field(factory=LogProbCheckSection)
    """The check that rollout engine and trainer give the same tokens the same probabilities."""
