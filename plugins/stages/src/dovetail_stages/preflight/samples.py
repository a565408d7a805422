"""Rules about the samples that a step learns from: their groups, and the rollout's log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from dovetail.interfaces import Finding
from dovetail.planning import Plan, Selected, generates, selected
from dovetail.plugins import load_plugin_class
from dovetail.sections import RunConfig
from dovetail_stages.preflight.lookup import correction_of, policy_loss_of, ratio_columns
from dovetail_stages.standard import estimates


def group_of_one(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Report an estimator that compares the samples of a prompt, but gets only one sample of each prompt.

    Most such estimators then give every advantage the value 0, so that the run learns nothing: an error. Some take a single sample's
    reward as its advantage, without any baseline: a warning.
    """
    estimator = selected("advantage", config.algorithm.advantage)
    if estimator is None or not generates(config):
        return
    if plan is not None and not estimates(plan.stages):
        return
    n, least = config.rollout.n, estimator.cls.min_group_size(estimator.config)
    if n < least:
        yield Finding.error(
            f"rollout.n = {n}, but algorithm.advantage = {estimator.name} compares the samples of one prompt and "
            f"needs at least {least}: every advantage would be 0",
            hint=f"set rollout.n={max(least, 8)}, or choose an estimator that needs no groups, such as "
            "algorithm.advantage=reinforce_plus_plus, or =score, which is the reward itself",
            instead_of="compares the samples of one prompt",
        )
    elif n == 1 and estimator.cls.scope == "group":
        yield Finding.warning(
            f"rollout.n = 1, and algorithm.advantage = {estimator.name} takes its baseline from the samples of "
            "one prompt: with one sample there is no baseline, and the advantage is the reward itself",
            hint="set rollout.n=8, or algorithm.advantage=score, which has no baseline",
        )


def several_sequences(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Report an error if the agent loop may split a trajectory into several sequences, but a plugin treats a sequence as a trajectory.

    Each sequence is a row of the batch. A trajectory with more sequences would then weigh more, or its sequences without a reward (all
    but the last) would be trained as failures. A plugin that supports trajectories of several sequences declares the capability
    `several_sequences`. An advantage estimator of level `sample` doesn't need the capability, since it gets one reward for each trajectory.
    """
    loop = selected("agent_loop", config.rollout.agent_loop)
    if loop is None or not generates(config):
        return
    anew = getattr(loop.config, "on_history_change", None) == "fork"
    if not anew and "forks" not in loop.cls.capabilities:
        return
    of_what = "on_history_change: fork" if anew else "capability 'forks'"
    why = f"agent loop {loop.name!r} makes samples of several sequences ({of_what}), but"
    estimator = selected("advantage", config.algorithm.advantage)
    unused = plan is not None and not plan.has_stage("advantage")
    if estimator and not unused and estimator.cls.level == "token" and not _takes(estimator):
        yield Finding.error(
            f"{why} algorithm.advantage = {estimator.name} estimates within each sequence alone",
            hint="choose an estimator at sample level, such as algorithm.advantage=grpo",
        )
    aggregation = selected("loss_aggregation", config.algorithm.loss_aggregation)
    if config.actor.objective is None and aggregation and not _takes(aggregation):
        yield Finding.error(
            f"{why} algorithm.loss_aggregation = {aggregation.name} weighs each sequence as a sample",
            hint="set algorithm.loss_aggregation=token_mean",
        )
    objective = selected("objective", config.actor.objective)
    if objective and objective.cls.unit != "sample" and not _takes(objective):
        yield Finding.error(
            f"{why} actor.objective = {objective.name} compares sequences as samples",
            hint="set actor.objective=null to train with algorithm.policy_loss",
        )
    for stage in plan.stages if plan is not None else ():
        cls: Any = load_plugin_class(stage.ref)
        changes = cls.changes_samples or stage.rewrites & {"scores", "token_rewards"}
        if changes and "several_sequences" not in cls.capabilities:
            yield Finding.error(
                f"{why} stage {stage.name} takes each sequence for a sample ({stage.because})",
                hint="leave the stage out, or run an agent loop that does not fork"
                + (", with on_history_change=keep" if anew else ""),
            )


def _takes(chosen: Selected) -> bool:
    return "several_sequences" in chosen.cls.capabilities


def filter_without_refill(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if a sample filter drops groups and no further round of generation replaces them: steps then train on smaller batches.

    The better the policy, the more groups have equal rewards. Late in training, a step may keep only a few prompts, while the learning
    rate is still that of a full batch, so that the gradient is noisier.
    """
    algorithm = config.algorithm
    if algorithm.max_generation_rounds > 1 or not generates(config):
        return
    for i, section in enumerate(algorithm.sample_filters):
        chosen = selected("sample_filter", section)
        if chosen is not None and chosen.cls.action_of(chosen.config) == "drop":
            yield Finding.warning(
                f"algorithm.sample_filters[{i}] = {chosen.name} drops groups, but "
                "algorithm.max_generation_rounds = 1 replaces none: steps train on fewer than "
                f"data.train_batch_size = {config.data.train_batch_size} prompts",
                hint="set algorithm.max_generation_rounds=10",
            )


def truncated_log_probs(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if a plugin uses the rollout's log-probabilities, but these are of a truncated distribution.

    With top-p, top-k or an engine's own setting (`RolloutSection.truncation`), the rollout samples only some of the tokens, and
    normalises their probabilities to a sum of 1. The trainer's distribution is over all tokens. The rollout's probabilities are then
    larger than the trainer's, which biases ratios and weights. The log-probability check takes this difference into account.
    """
    reader = None if plan is None else plan.facts.required.get("rollout_log_probs")
    cuts = {f"rollout.{key}": cut for key, cut in config.rollout.truncation().items()}
    if cuts and reader is not None:
        yield Finding.warning(
            f"{' and '.join(f'{key} = {value}' for key, (value, _) in cuts.items())}: the rollout's log-probabilities are "
            f"of the truncated distribution, but {reader} compares them with the trainer's, which are of the "
            "full distribution",
            hint="set " + " ".join(f"{key}={whole}" for key, (_, whole) in cuts.items()),
        )


def correction_without_log_probs(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Report an error if a rollout correction is configured, but the rollout engine returns no log-probabilities.

    The correction weights or rejects tokens by the ratio of the training policy to the rollout policy, and so needs the
    log-probabilities of both.
    """
    correction = correction_of(config)
    engine = selected("rollout", config.rollout)
    if correction is None or engine is None or not generates(config):
        return
    if "logprobs" in engine.cls.capabilities:
        return
    yield Finding.error(
        f"algorithm.rollout_correction = {correction.name} compares the rollout's log-probabilities with the "
        f"trainer's, but rollout.name = {engine.name} does not return any (it lacks the capability 'logprobs')",
        hint="set algorithm.rollout_correction=null, or choose an engine with that capability "
        "(`dovetail plugins list rollout`)",
        instead_of="'rollout_log_probs'",
    )


def weights_ignored(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if a rollout correction's importance weights are not used, because the loss itself has a ratio to the rollout policy.

    The ratio of a loss such as `dppo` is to the rollout policy. In the correction's mode `bypass`, the rollout policy is the old policy, so
    the ratio of a loss such as PPO's is to the rollout policy, too. Such a ratio is already the correction. Weights would correct a second
    time, so the run leaves them out, and the correction only rejects tokens.
    """
    correction = correction_of(config)
    loss = policy_loss_of(config)
    if correction is None or loss is None:
        return
    weights = getattr(correction.config, "weights", None)
    bypass = correction.cls.mode(correction.config) == "bypass"
    anchors = {"rollout_log_probs"} | ({"old_log_probs"} if bypass else set())
    if weights is not None and ratio_columns(loss) & anchors:
        yield Finding.warning(
            f"algorithm.rollout_correction = {correction.name} computes an importance weight per {weights}, but "
            f"algorithm.policy_loss = {loss.name} has a ratio to the rollout policy itself, so the weights are "
            "not used",
            hint="set algorithm.policy_loss=reinforce, or algorithm.rollout_correction=bypass_ppo_clip "
            "if you want the ratio",
        )


def logprob_check_never_fires(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if the settings of the log-probability check make it never measure, never warn, or stop the run before it warns."""
    section = config.algorithm.logprob_check
    key = "algorithm.logprob_check"
    if not generates(config):
        return
    if section.warn_above >= 1:
        yield Finding.warning(
            f"{key}.warn_above = {section.warn_above:g} is never exceeded: two probabilities differ by at most 1",
            hint=f"set {key}.warn_above=0.01",
        )
    if section.stop_above is not None and section.stop_above >= 1:
        yield Finding.warning(
            f"{key}.stop_above = {section.stop_above:g} is never exceeded: two probabilities differ by at most 1",
            hint=f"set {key}.stop_above=0.1, or null to never stop",
        )
    elif section.stop_above is not None and section.stop_above < section.warn_above:
        yield Finding.warning(
            f"{key}.stop_above = {section.stop_above:g} is below {key}.warn_above = {section.warn_above:g}: "
            "the run stops before it has ever warned",
            hint=f"set {key}.warn_above={section.stop_above / 10:g}, or {key}.stop_above=null to never stop",
        )
    if plan is not None:
        yield from _never_measures(config, plan)


def _never_measures(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    section, steps = config.algorithm.logprob_check, plan.counts.steps
    standard = type(section)()
    if not plan.has_stage("logprob_check"):
        # No setting gives this engine log-probabilities, so a warning is useful only if the config sets up the check.
        if section != standard:
            yield Finding.warning(
                f"algorithm.logprob_check can't measure: rollout.name = {plan.refs['rollout'].name} gives no "
                "log-probabilities (it lacks the capability 'logprobs')",
                hint="leave algorithm.logprob_check out, or choose an engine with that capability",
            )
    elif section.every == 0 and "rollout_log_probs" not in plan.on_request:
        # `every=0` alone turns the check off. With further settings of the check, that was probably not meant.
        if attrs.evolve(section, every=standard.every) != standard:
            yield Finding.warning(
                "algorithm.logprob_check.every = 0 measures only if another plugin requires the rollout's log-probabilities, "
                "and nothing in this config requires them: the check's bounds have no effect",
                hint="set algorithm.logprob_check.every=10",
            )
    elif steps is not None and section.every > max(steps, standard.every):
        yield Finding.warning(
            f"algorithm.logprob_check.every = {section.every} is more than the run's {steps} steps: the check measures only at the "
            "first step",
            hint=f"set algorithm.logprob_check.every={max(1, steps // 4)}",
        )
