"""Rules about what a config names and nothing uses: a critic without values, a metric that nobody reports, a needless option."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import attrs

from dovetail.errors import nearest
from dovetail.interfaces.preflight import Finding, PreflightRule
from dovetail.planning.plan import Plan
from dovetail.preflight.selected import generates
from dovetail.preflight.sizes import has_critic
from dovetail.sections import (
    AlgorithmSection,
    CriticSection,
    PluginSection,
    RewardSection,
    RunConfig,
)
from dovetail.sections.algorithm import LogProbCheckSection
from dovetail.sections.fields import PLUGIN_DEFAULT
from dovetail.stages.wording import settings

_FIGURE = re.compile(r"val/(?:(?P<source>.+)/)?(?P<figure>[a-z]+@\d+)(?:/(?:low|high))?")


class CriticUnused(PreflightRule):
    """Keys of the critic are set, but nothing requires values, so that there is no critic and they do nothing."""

    name = "critic_unused"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        if plan is None or has_critic(plan):
            return
        keys = [f"critic.{key}" for key in _changed(config.critic, CriticSection())]
        if not keys:
            return
        said = f"{', '.join(keys)}: there is no critic, since nothing requires `values` "
        if plan.has_stage("advantage"):
            yield self.warning(
                said + f"(algorithm.advantage = {plan.refs['algorithm.advantage'].name})",
                hint="set algorithm.advantage=gae, or leave the critic's keys out",
            )
        else:
            yield self.warning(
                said
                + f"(actor.objective = {plan.refs['actor.objective'].name} needs no advantages)",
                hint="leave the critic's keys out, or set actor.objective=null for a policy loss with advantages",
            )


class AlgorithmUnused(PreflightRule):
    """Keys of the algorithm are set, but the actor has an objective of its own, which reads nothing that they make.

    A KL penalty or a clip bound that does nothing shows in no metric: the policy drifts while the config says that it is held.
    """

    name = "algorithm_unused"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        if plan is None or not plan.generates or config.actor.objective is None:
            return  # without a rollout, `rollout_unused` names them
        keys = [f"algorithm.{key}" for key in _without_effect(config.algorithm, plan)]
        if keys:
            yield self.warning(
                f"{', '.join(keys)}: the actor minimises actor.objective = {plan.refs['actor.objective'].name}, "
                "for which nothing of this is used",
                hint="leave the keys out, or set actor.objective=null for the policy loss of `algorithm`",
            )


class RolloutUnused(PreflightRule):
    """Keys of rollout, rewards or the algorithm are set, but the run trains on a dataset's examples and uses none of them.

    So it is where the config of a run of reinforcement learning is given another trainer, or a reward is expected to act.
    """

    name = "rollout_unused"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        if plan is None or plan.generates:
            return
        standard = attrs.fields_dict(RunConfig)["rollout"].metadata[PLUGIN_DEFAULT]
        check = _changed(config.algorithm.logprob_check, LogProbCheckSection())
        keys = [
            *(f"rollout.{key}" for key in _set(config.rollout, standard)),
            *(f"reward.{key}" for key in _changed(config.reward, RewardSection())),
            *(f"algorithm.{key}" for key in _without_effect(config.algorithm, plan)),
            *(f"algorithm.logprob_check.{key}" for key in check),
            *(["algorithm.max_generation_rounds"] * (config.algorithm.max_generation_rounds > 1)),
            *(["data.val_batch_size"] * (config.data.val_batch_size is not None)),
        ]
        if keys:
            yield self.warning(
                f"{', '.join(keys)}: trainer {plan.refs['trainer'].name} trains on {plan.counts.of.name} of the dataset; nothing is "
                "generated or scored, and none of this is used",
                hint="leave the keys out, or choose a trainer that generates, such as trainer.name=on_policy",
            )


class PartialRolloutUnused(PreflightRule):
    """`rollout.partial_rollout` is set, but the trainer does not generate ahead, so that no response is ever cut short; or
    `rollout.keep_cache` is set without it.
    """

    name = "partial_rollout_unused"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        if plan is None or not plan.generates:
            return
        if config.rollout.partial_rollout and not plan.facts.age:
            yield self.warning(
                f"rollout.partial_rollout=true cuts nothing short: trainer {plan.refs['trainer'].name} waits for all responses "
                "of a step before it learns",
                hint="choose a trainer that generates ahead (`run.admit`), or set rollout.partial_rollout=false",
            )
        if config.rollout.keep_cache and not config.rollout.partial_rollout:
            yield self.warning(
                "rollout.keep_cache=true keeps nothing: with rollout.partial_rollout=false responses end before weights are sent",
                hint="set trainer={name: streaming, on_sync: keep}, or rollout.keep_cache=false",
            )


class BestMetricUnknown(PreflightRule):
    """`trainer.best_metric` names what validation never reports, so that no checkpoint is ever marked as the best."""

    name = "best_metric_unknown"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        # The figures' module needs NumPy and more, which a config without this key has no use for.
        from dovetail.rollouts.validation import BESIDES, figure_names, metric_names

        metric, n = config.trainer.best_metric, config.rollout.validation.n
        if metric is None:
            return
        if not config.data.val_files:
            yield self.error(
                f"trainer.best_metric = {metric}, but nothing is validated: data.val_files names no file",
                hint="set data.val_files, or trainer.best_metric=null",
            )
            return
        if not generates(config):
            return  # the objective's figures
        match = _FIGURE.fullmatch(metric)
        # Data sources are known only once the data has been read; any name may be one.
        if metric in BESIDES or (match is not None and match["figure"] in figure_names(n)):
            return
        source = match["source"] if match is not None else None
        known = metric_names(n, [source] if source else [])
        close = nearest(metric, known)
        yield self.error(
            f"trainer.best_metric = {metric} is no figure of validation at rollout.validation.n = {n}; there are "
            f"{', '.join(f'val/{name}' for name in figure_names(n))}, and the same for each data source "
            "(val/<data_source>/…)",
            hint=f"set trainer.best_metric={close or f'val/mean@{n}'}",
        )


def _changed(section: Any, defaults: Any) -> Iterator[str]:
    """Keys whose values are not the defaults'."""
    for field in attrs.fields(type(section)):
        value, default = getattr(section, field.name), getattr(defaults, field.name)
        if isinstance(value, PluginSection):
            yield from _changed_plugin(field, value, default)
        elif attrs.has(type(value)):
            yield from (f"{field.name}.{key}" for key in _changed(value, default))
        elif value != default:
            yield field.name


def _changed_plugin(
    field: attrs.Attribute[Any], section: PluginSection, default: Any
) -> Iterator[str]:
    """A field where it selects another plugin than the default, or else the plugin's settings that are not at their defaults."""
    if section.path is not None or section.name != field.metadata.get(PLUGIN_DEFAULT):
        yield field.name
    else:
        yield from (f"{field.name}.{key}" for key in _changed_settings(section, default))


def _changed_settings(section: PluginSection, given: Any = None) -> Iterator[str]:
    """Settings of a plugin that are not at their defaults: at those of `given` where it has them, otherwise at the plugin's own."""
    fields = attrs.fields_dict(type(section))
    for key, value, own in settings(section):
        default = getattr(given, key, own)
        if isinstance(value, PluginSection):
            yield from _changed_plugin(fields[key], value, default)
        elif value != default:
            yield key


def _without_effect(algorithm: AlgorithmSection, plan: Plan) -> Iterator[str]:
    """Keys that are not at their defaults, and that only a policy loss or an estimator of advantages would use."""
    parts = ["policy_loss", "loss_aggregation"]
    if not plan.has_stage("advantage"):
        parts.insert(0, "advantage")
    for key in parts:
        standard = attrs.fields_dict(AlgorithmSection)[key].metadata[PLUGIN_DEFAULT]
        if any(_set(getattr(algorithm, key), standard)):
            yield key
    if algorithm.kl.in_loss is not None and algorithm.kl.in_loss.coef:
        yield "kl.in_loss"
    if algorithm.entropy.coef:
        yield "entropy.coef"
    if algorithm.rollout_correction is not None and not plan.has_stage("rollout_correction"):
        yield "rollout_correction"
    penalties = {"kl_penalty": "kl.in_reward", "overlong_penalty": "overlong_penalty"}
    rewards = {"scores", "token_rewards"}
    if not any(
        rewards & stage.reads.keys() for stage in plan.stages if stage.name not in penalties
    ):
        yield from (key for stage, key in penalties.items() if plan.has_stage(stage))


def _set(section: PluginSection, standard: str) -> Iterator[str]:
    """What selects another plugin than the default, and settings that are not at their defaults."""
    if section.path is not None or section.name != standard:
        yield "name" if section.path is None else "path"
    yield from _changed_settings(section)
