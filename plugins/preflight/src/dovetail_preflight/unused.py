"""Rules about parts without effect: keys of a config, the order of a stage relative to unknown stages, and rewrites of unread columns."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import attrs

from dovetail.errors import nearest
from dovetail.interfaces import Finding
from dovetail.planning import Plan, has_critic
from dovetail.plugins import default_index
from dovetail.sections import (
    PLUGIN_DEFAULT,
    AlgorithmSection,
    CriticSection,
    LogProbCheckSection,
    PluginSection,
    RewardSection,
    RunConfig,
    own_fields,
)

_MISSPELT = 0.8
"""Minimum similarity at which a name counts as misspelt, and not as the name of a stage that is not installed."""


def critic_unused(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if keys of the critic are set, but have no effect: the run has no critic, since no plugin requires the column `values`."""
    if plan is None or has_critic(plan):
        return
    keys = [f"critic.{key}" for key in _changed(config.critic, CriticSection())]
    if not keys:
        return
    said = f"{', '.join(keys)}: these keys have no effect: the run has no critic, since nothing requires `values` "
    if plan.has_stage("advantage"):
        yield Finding.warning(
            said + f"(algorithm.advantage = {plan.refs['algorithm.advantage'].name})",
            hint="set algorithm.advantage=gae, or leave the critic's keys out",
        )
    else:
        yield Finding.warning(
            said + f"(actor.objective = {plan.refs['actor.objective'].name} needs no advantages)",
            hint="leave the critic's keys out, or set actor.objective=null for a policy loss with advantages",
        )


def algorithm_unused(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if keys of the algorithm are set that the objective of `actor.objective` does not use.

    No metric shows that a KL penalty or a clip bound has no effect: the policy drifts although the config seems to limit the drift.
    """
    if plan is None or not plan.generates or config.actor.objective is None:
        return  # without a rollout, the rule `rollout_unused` names these keys
    keys = [f"algorithm.{key}" for key in _without_effect(config, plan)]
    if keys:
        yield Finding.warning(
            f"{', '.join(keys)}: these keys have no effect: the actor minimises actor.objective = {plan.refs['actor.objective'].name}, "
            "which uses none of them",
            hint="leave the keys out, or set actor.objective=null for the policy loss of `algorithm`",
        )


def rollout_unused(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if keys of rollout, rewards or the algorithm are set, but the run trains on a dataset's examples and does not use these keys.

    Such keys may remain if the config of a reinforcement-learning run gets another trainer, or if its author expects a reward to have an
    effect.
    """
    if plan is None or plan.generates:
        return
    standard = attrs.fields_dict(RunConfig)["rollout"].metadata[PLUGIN_DEFAULT]
    check = _changed(config.algorithm.logprob_check, LogProbCheckSection())
    keys = [
        *(f"rollout.{key}" for key in _set(config.rollout, standard)),
        *(f"reward.{key}" for key in _changed(config.reward, RewardSection())),
        *(f"algorithm.{key}" for key in _without_effect(config, plan)),
        *(f"algorithm.logprob_check.{key}" for key in check),
        *(["algorithm.max_generation_rounds"] * (config.algorithm.max_generation_rounds > 1)),
        *(["data.val_batch_size"] * (config.data.val_batch_size is not None)),
    ]
    if keys:
        yield Finding.warning(
            f"{', '.join(keys)}: these keys have no effect: trainer {plan.refs['trainer'].name} trains on {plan.counts.of.name} of the dataset, "
            "and generates and scores nothing",
            hint="leave the keys out, or choose a trainer that generates, such as trainer.name=on_policy",
        )


def _changed(section: Any, defaults: Any) -> Iterator[str]:
    """Yield the keys whose values differ from the defaults."""
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
    """Yield the changed keys of a field whose value selects a plugin.

    These are the field itself if another plugin than the default is selected, else the plugin's settings that differ from `default`.
    """
    if section.path is not None or section.name != field.metadata.get(PLUGIN_DEFAULT):
        yield field.name
    else:
        yield from (f"{field.name}.{key}" for key in _changed_settings(section, default))


def _changed_settings(section: PluginSection, given: Any = None) -> Iterator[str]:
    """Yield the keys of a plugin's settings that differ from `given` or, if `given` lacks the key, from the plugin's own defaults."""
    fields = attrs.fields_dict(type(section))
    for key, value, own in own_fields(section):
        default = getattr(given, key, own)
        if isinstance(value, PluginSection):
            yield from _changed_plugin(fields[key], value, default)
        elif value != default:
            yield key


def _without_effect(config: RunConfig, plan: Plan) -> Iterator[str]:
    """Yield the keys of the section `algorithm` that are set without effect: the run lacks the policy loss, the estimator or the stage that
    would use them.
    """
    algorithm, has_policy_loss = config.algorithm, config.actor.objective is None
    parts = [] if has_policy_loss else ["policy_loss", "loss_aggregation"]
    if not plan.has_stage("advantage"):
        parts.insert(0, "advantage")
    for key in parts:
        standard = attrs.fields_dict(AlgorithmSection)[key].metadata[PLUGIN_DEFAULT]
        if any(_set(getattr(algorithm, key), standard)):
            yield key
    if not has_policy_loss:
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
    """Yield the keys of a plugin's section that are set: `name` or `path` if it selects another plugin than `standard`, the default, and
    the settings that are not at their defaults.
    """
    if section.path is not None or section.name != standard:
        yield "name" if section.path is None else "path"
    yield from _changed_settings(section)


def stage_order_unknown(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if a stage's `before` or `after` names a stage that does not exist, but resembles the name of an existing stage."""
    if plan is None:
        return
    known = {stage.name for stage in plan.stages}
    known |= {entry.name for entry in default_index().entries("stage")}
    for path, plugin in plan.facts.plugins.items():
        if plugin.ref.kind != "stage":
            continue
        for attribute in ("before", "after"):
            for other in getattr(plugin.cls, attribute):
                if other not in known and (near := nearest(other, known, cutoff=_MISSPELT)):
                    yield Finding.warning(
                        f"{path}: the attribute `{attribute}` of {plugin.cls.name} names the stage {other!r}; no stage has this name",
                        hint=f"if the plugin's author meant {near!r}, correct `{attribute}` in the plugin",
                    )


def rewrite_unread(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if a stage rewrites only scores, but the estimator reads token rewards, or vice versa: the rewrite has no effect."""
    if plan is None:
        return
    estimator = plan.facts.plugins["algorithm.advantage"]
    # Read statically, since a level that is a property depends on the config of an instance.
    level = inspect.getattr_static(estimator.cls, "level", None)
    written = {"token": "scores", "sample": "token_rewards"}.get(str(level))
    read = "token_rewards" if written == "scores" else "scores"
    for stage in plan.stages:
        if written in stage.rewrites and read not in stage.rewrites:
            yield Finding.warning(
                f"the stage {stage.name} has no effect on advantages: it rewrites {written!r}, but {estimator.title} reads {read!r}",
                hint=f"rewrite {read!r} in the stage as well, and name this column in the stage's `rewrites`",
            )
