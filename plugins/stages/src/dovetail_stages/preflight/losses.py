"""Rules about the loss and its KL penalty: unbounded updates, bounds meant for another loss, aggregations unlike the paper's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from dovetail.interfaces import Finding
from dovetail.planning import Plan, count, has_critic, selected
from dovetail.sections import RunConfig
from dovetail_stages.config import SeqMeanTokenSumNormConfig
from dovetail_stages.preflight.lookup import (
    correction_of,
    kl_in_loss_of,
    policy_loss_of,
    ratio_columns,
)

WIDE = 10.0
"""Smallest `clip_high` that clips nothing in practice: a probability would have to grow elevenfold in one step."""
NARROW = 0.01
"""Clip bounds below this are meant for the length-normalised ratio of a whole sequence."""
WIDE_FOR_NARROW = 0.05
"""Clip bounds above this are never reached by the length-normalised ratio of a sequence."""


def off_policy_unclipped(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if a step has several updates, but nothing limits how far the policy moves from the one that generated the samples.

    From the second update on, the samples come from an older policy. A loss without a ratio to that policy then follows a wrong gradient.
    A loss whose upper bound is never reached lets a token's probability grow without limit. In both cases the run looks normal for a while
    and then collapses. `actor.max_kl` limits the growth, by ending a step's updates early. A rollout correction of mode `bypass` with importance
    weights supplies the missing ratio: it weights each token by the ratio of the current policy to the rollout policy.
    """
    loss = policy_loss_of(config)
    counts = count(config, None)
    if loss is None or counts.updates_per_step == 1 or _weighs_by_the_current_ratio(config):
        return
    many = (
        f"a step has {counts.updates_per_step} updates (actor.epochs = {config.actor.epochs}, "
        f"actor.mini_batch_size = {counts.prompts_per_mini_batch} of data.train_batch_size = "
        f"{counts.prompts_per_step})"
    )
    clip_high = getattr(loss.config, "clip_high", None)
    if not ratio_columns(loss):
        yield Finding.warning(
            f"{many}, but algorithm.policy_loss = {loss.name} has no ratio to the policy that generated the samples: "
            "all updates but the first follow the gradient of an outdated policy",
            hint="set actor.epochs=1 and actor.mini_batch_size=null, or choose a loss with a ratio such as "
            "algorithm.policy_loss=ppo_clip",
        )
    elif config.actor.max_kl is None and isinstance(clip_high, int | float) and clip_high >= WIDE:
        yield Finding.warning(
            f"{many}, but algorithm.policy_loss.clip_high = {clip_high:g} clips nothing in practice: "
            "nothing keeps the policy near the one that generated the samples",
            hint="set algorithm.policy_loss.clip_high=0.2, or bound the step with actor.max_kl=0.05",
        )


def max_kl_never_fires(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if `actor.max_kl` is set, but a step has only one update; if the loss measures no KL, report an error.

    The KL to the old policy is 0 in a step's first update by definition, so with one update a step it never exceeds the bound. A loss
    without a ratio to an older policy measures no KL. In both cases `actor.max_kl` has no effect.
    """
    if config.actor.max_kl is None:
        return
    loss = policy_loss_of(config)
    if loss is not None and not ratio_columns(loss):
        yield Finding.error(
            f"actor.max_kl = {config.actor.max_kl:g}, but algorithm.policy_loss = {loss.name} has no ratio to an "
            "older policy, and so measures no KL that could end a step's updates",
            hint="set actor.max_kl=null, or choose a loss with a ratio such as algorithm.policy_loss=ppo_clip",
        )
    elif count(config, None).updates_per_step == 1:
        yield Finding.warning(
            f"actor.max_kl = {config.actor.max_kl:g}, but a step has only one update, at which the KL to the old policy is 0",
            hint="set actor.max_kl=null, or actor.epochs=2 for several updates",
        )


def loss_aggregation_overridden(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if the configured loss aggregation is not the one that the paper of the chosen loss or estimator prescribes.

    A sequence-level loss averaged over all tokens, for example, weighs long responses more than the paper's derivation assumes.
    If both papers prescribe an aggregation, the rule follows the loss's paper.
    """
    if config.actor.objective is not None:
        return
    algorithm = config.algorithm
    given = algorithm.loss_aggregation
    for kind, section in (
        ("policy_loss", algorithm.policy_loss),
        ("advantage", algorithm.advantage),
    ):
        chosen = selected(kind, section)
        wanted = chosen.cls.aggregation if chosen is not None else None
        if chosen is None or wanted is None:
            continue
        if wanted != given.name:
            yield Finding.warning(
                f"algorithm.loss_aggregation = {given.name or given.path}, but the paper of "
                f"algorithm.{kind} = {chosen.name} prescribes {wanted}",
                hint=f"set algorithm.loss_aggregation={wanted}, or keep yours with "
                f"preflight.ignore={'loss_aggregation_overridden'}",
            )
        return


def clip_range_of_another_loss(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if the clip bounds suit the ratio of a token, but the loss clips the ratio of a whole sequence, or vice versa.

    The length-normalised ratio of a whole sequence moves by a few 1e-4 an update, a token's ratio by tenths. GSPO
    (arXiv 2507.18071) with the bounds of PPO never clips; PPO with those of GSPO clips nearly every token. The
    defaults of a loss's bounds show which ratio it clips.
    """
    loss = policy_loss_of(config)
    if loss is None:
        return
    own, wrong = {}, []
    for key, given, default in _clip_bounds(loss.config):
        own[key] = default
        narrow = default < NARROW and given > WIDE_FOR_NARROW
        wide = default >= 10 * NARROW and 0 < given < NARROW
        if narrow or wide:
            wrong.append((f"{key} = {given:g}", narrow))
    if wrong:
        narrow = wrong[0][1]
        what = (
            "it bounds the ratio of a whole sequence, which moves by a few 1e-4, so these bounds clip nothing"
            if narrow
            else "it bounds each token's ratio, which moves by tenths, so these bounds clip nearly every token"
        )
        yield Finding.warning(
            f"algorithm.policy_loss = {loss.name} has {' and '.join(said for said, _ in wrong)}, but {what}",
            hint="set "
            + " ".join(f"algorithm.policy_loss.{key}={value:g}" for key, value in own.items()),
        )


def norm_length(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if the constant by which token sums are divided is not the maximum length of a response, `data.max_response_length`.

    Dr. GRPO (arXiv 2503.20783) divides by the maximum length of a response. Any other constant scales the gradient, and so the
    effective learning rate, by a factor that the config does not show.
    """
    longest = config.data.max_response_length
    for path, section in (
        (
            "algorithm",
            config.algorithm.loss_aggregation if config.actor.objective is None else None,
        ),
        ("critic", config.critic.loss_aggregation if has_critic(plan) else None),
    ):
        if not isinstance(section, SeqMeanTokenSumNormConfig) or section.length == longest:
            continue
        yield Finding.warning(
            f"{path}.loss_aggregation.length = {section.length}, but data.max_response_length = {longest}: "
            f"the loss is {longest / section.length:.3g} times as large as with length = data.max_response_length",
            hint=f"set {path}.loss_aggregation.length='${{data.max_response_length}}'",
        )


def _clip_bounds(config: Any) -> Iterator[tuple[str, float, float]]:
    """Yield key, value and default of a loss's `clip_low` and `clip_high`, if they are numbers."""
    for key in ("clip_low", "clip_high"):
        field = attrs.fields_dict(type(config)).get(key)
        value = getattr(config, key, None)
        if field is None or not isinstance(value, int | float):
            continue
        if isinstance(field.default, int | float):
            yield key, value, field.default


def _weighs_by_the_current_ratio(config: RunConfig) -> bool:
    correction = correction_of(config)
    return (
        correction is not None
        and correction.cls.mode(correction.config) == "bypass"
        and getattr(correction.config, "weights", None) is not None
    )


def kl_twice(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """The KL penalty is both in the loss and in the reward: it counts twice, more strongly than either coefficient says."""
    in_loss, in_reward = kl_in_loss_of(config), config.algorithm.kl.in_reward
    if in_loss is not None and in_reward is not None and in_reward.coef:
        yield Finding.warning(
            f"algorithm.kl.in_loss.coef = {in_loss.coef:g} and algorithm.kl.in_reward.coef = "
            f"{in_reward.coef:g}: the policy is held near the reference twice",
            hint="set algorithm.kl.in_loss=null or algorithm.kl.in_reward=null",
        )


def k1_in_loss(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if the KL penalty in the loss uses the estimator k1, whose expected gradient on-policy is zero.

    k1 is log π − log π_ref. Its gradient is the score function, whose mean under π is zero. The penalty appears in
    the metrics and adds noise to the gradient, but does not hold the policy near the reference (joschu.net/blog/kl-approx.html).
    """
    kl = kl_in_loss_of(config)
    if kl is not None and kl.estimator == "k1":
        yield Finding.warning(
            f"algorithm.kl.in_loss.estimator = k1 with coef = {kl.coef:g}: its expected gradient on-policy is "
            "zero, so it does not hold the policy near the reference",
            hint="set algorithm.kl.in_loss.estimator=k3, or k1+ for k1's value with a gradient; "
            "or put the penalty into the reward (algorithm.kl.in_reward), where k1 is right",
        )
