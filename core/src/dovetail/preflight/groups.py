"""Rules about groups: the samples of one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.interfaces.preflight import Finding, PreflightRule
from dovetail.planning.plan import Plan
from dovetail.plugins.load import load_plugin_class
from dovetail.preflight.selected import Selected, generates, selected
from dovetail.sections import RunConfig


class GroupOfOne(PreflightRule):
    """An estimator that compares a prompt's samples with one another is given one sample a prompt.

    Every advantage is then 0, and a run goes on for days without learning; or, where a lone sample's advantage is its
    reward, there is no baseline, which is not what the estimator's name promises.
    """

    name = "group_of_one"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        estimator = selected("advantage", config.algorithm.advantage)
        if estimator is None or not generates(config):
            return
        if plan is not None and not plan.has_stage("advantage"):
            return  # an objective of the actor's own reads no advantages
        n, least = config.rollout.n, estimator.cls.min_group_size(estimator.config)
        if n < least:
            yield self.error(
                f"rollout.n = {n}, but algorithm.advantage = {estimator.name} compares the samples of one prompt and "
                f"needs at least {least}: every advantage would be 0",
                hint=f"set rollout.n={max(least, 8)}, or choose an estimator that needs no groups, such as "
                "algorithm.advantage=reinforce_plus_plus",
                instead_of="compares the samples of one prompt",
            )
        elif n == 1 and estimator.cls.scope == "group":
            yield self.warning(
                f"rollout.n = 1, and algorithm.advantage = {estimator.name} takes its baseline from the samples of "
                "one prompt: there is none, and the advantage is the reward as it is",
                hint="set rollout.n=8, or choose an estimator that needs no groups, such as "
                "algorithm.advantage=reinforce_plus_plus",
            )


class SeveralSequences(PreflightRule):
    """The agent loop forks its sessions, and what is configured takes every row of a batch for a trajectory.

    A trajectory of several sequences would then weigh by their number, or the sequences before the last, which have no reward of their
    own, would be trained against. A plugin that takes the sequences of a trajectory together has the capability `several_sequences`;
    estimators at sample level get the rewards of trajectories and need none.
    """

    name = "several_sequences"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        loop = selected("agent_loop", config.rollout.agent_loop)
        if loop is None or not generates(config):
            return
        anew = getattr(loop.config, "on_history_change", None) == "fork"
        if not anew and "forks" not in loop.cls.capabilities:
            return
        of_what = "on_history_change: fork" if anew else "its capability forks"
        why = f"agent loop {loop.name!r} makes samples of several sequences ({of_what}), but"
        estimator = selected("advantage", config.algorithm.advantage)
        unused = plan is not None and not plan.has_stage("advantage")
        if estimator and not unused and estimator.cls.level == "token" and not _takes(estimator):
            yield self.error(
                f"{why} algorithm.advantage = {estimator.name} estimates within each sequence alone",
                hint="choose an estimator at sample level, such as algorithm.advantage=grpo",
            )
        aggregation = selected("loss_aggregation", config.algorithm.loss_aggregation)
        if config.actor.objective is None and aggregation and not _takes(aggregation):
            yield self.error(
                f"{why} algorithm.loss_aggregation = {aggregation.name} weighs each sequence as a sample",
                hint="set algorithm.loss_aggregation=token_mean",
            )
        objective = selected("objective", config.actor.objective)
        if objective and objective.cls.unit != "sample" and not _takes(objective):
            yield self.error(
                f"{why} actor.objective = {objective.name} compares sequences as samples",
                hint="set actor.objective=null for algorithm.policy_loss",
            )
        for stage in plan.stages if plan is not None else ():
            cls: Any = load_plugin_class(stage.ref)
            changes = cls.changes_samples or stage.rewrites & {"scores", "token_rewards"}
            if changes and "several_sequences" not in cls.capabilities:
                yield self.error(
                    f"{why} stage {stage.name} takes each sequence for a sample ({stage.because})",
                    hint="leave the stage out, or run an agent loop that does not fork"
                    + (", with on_history_change=keep" if anew else ""),
                )


def _takes(chosen: Selected) -> bool:
    return "several_sequences" in chosen.cls.capabilities


class FilterWithoutRefill(PreflightRule):
    """A sample filter drops groups, and nothing replaces them: batches shrink, and with them the gradient's quality.

    The better the policy, the more groups have equal rewards: late in training a step may be left with a handful of
    prompts while the learning rate stays what it was for a full batch.
    """

    name = "filter_without_refill"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        algorithm = config.algorithm
        if algorithm.max_generation_rounds > 1 or not generates(config):
            return
        for i, section in enumerate(algorithm.sample_filters):
            chosen = selected("sample_filter", section)
            if chosen is not None and chosen.cls.action_of(chosen.config) == "drop":
                yield self.warning(
                    f"algorithm.sample_filters[{i}] = {chosen.name} drops groups, but "
                    "algorithm.max_generation_rounds = 1 replaces none: steps train on fewer than "
                    f"data.train_batch_size = {config.data.train_batch_size} prompts",
                    hint="set algorithm.max_generation_rounds=10",
                )
