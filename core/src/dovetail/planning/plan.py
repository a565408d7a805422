"""The plan of a run: which stages and models a step needs, from what the chosen plugins require and provide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dovetail.errors import PlanError
from dovetail.interfaces.objective import KlTerm, ObjectiveSpec, ValueObjectiveSpec
from dovetail.interfaces.runtime import PluginRef
from dovetail.planning.counts import Counts, count
from dovetail.planning.images import check_images
from dovetail.planning.placement import Placement, place
from dovetail.planning.requirements import ROLLOUT_ON_REQUEST, Demands, find_demands
from dovetail.planning.resolved_plugins import Chosen, choose, refs_of
from dovetail.planning.stages import ModelRole, Stage, models_of, stages_of
from dovetail.sections import RunConfig


@attrs.frozen(kw_only=True)
class Plan:
    """Everything decided before a run starts."""

    stages: tuple[Stage, ...]
    models: tuple[ModelRole, ...]
    refs: Mapping[str, PluginRef]
    """The chosen plugin of each config section, by its key path."""
    counts: Counts
    demands: Mapping[str, str]
    """Every column that something requires before the update, and who does."""
    rollout_log_probs: bool
    """Whether every rollout is asked for log-probabilities under the sampler."""
    raw_rollout_log_probs: bool
    actor_outputs: frozenset[str]
    """What the actor's pass before the update computes; empty where there is no such pass."""
    ref_from_actor: bool
    """`ref_log_probs` come out of the actor's pass, with its adapter off."""
    bypass: bool
    """The rollout's log-probabilities are taken for the old ones."""
    gate_log_probs: tuple[str, ...]
    """Columns that the consistency gate asks the rollout for; empty where the engine has none to give."""
    objective: ObjectiveSpec
    value_objective: ValueObjectiveSpec | None
    """What the critic minimises; None where there is none."""
    placement: Placement
    """Where everything lives."""
    rollout_capabilities: frozenset[str] = frozenset()
    """What the rollout engine can do beyond its interface."""

    def has_stage(self, name: str) -> bool:
        """Whether a step runs this stage."""
        return any(stage.name == name for stage in self.stages)


def make_plan(config: RunConfig, *, prompts: int | None = None, images: bool = False) -> Plan:
    """Work out the stages, models and counts of a run.

    Args:
        config: the whole config.
        prompts: training prompts after filtering; None where the data has not been read.
        images: whether prompts have images, which every engine must then take.

    Raises:
        PlanError: a requirement that nothing meets, or counts that do not fit. Names both sides.
    """
    chosen = choose(config)
    _check_group_size(config, chosen["algorithm.advantage"])
    counts = count(config, prompts)
    demands = find_demands(config, chosen, counts)
    if demands.critic:
        counts = attrs.evolve(counts, critic_warmup_steps=config.critic.warmup_steps)
    gate = _gate_columns(chosen["rollout"])
    if images:
        check_images(chosen, critic=demands.critic)
    placement, models = place(config, chosen, tuple(models_of(config, chosen, demands)))
    return Plan(
        stages=tuple(stages_of(config, chosen, demands, gate)),
        models=models,
        refs=refs_of(chosen),
        counts=counts,
        demands=demands.columns,
        rollout_log_probs="rollout_log_probs" in demands.columns,
        raw_rollout_log_probs="raw_rollout_log_probs" in demands.columns,
        actor_outputs=demands.actor_outputs(),
        ref_from_actor=demands.ref_from_actor and "ref_log_probs" in demands.columns,
        bypass=demands.bypass,
        gate_log_probs=gate,
        objective=_objective(config, chosen, demands),
        value_objective=ValueObjectiveSpec(
            loss_aggregation=chosen["critic.loss_aggregation"].ref, clip=config.critic.value_clip
        )
        if demands.critic
        else None,
        placement=placement,
        rollout_capabilities=chosen["rollout"].cls.capabilities,
    )


def _objective(config: RunConfig, chosen: Mapping[str, Chosen], demands: Demands) -> ObjectiveSpec:
    loss, kl = chosen["algorithm.policy_loss"], config.algorithm.kl.in_loss
    correction = chosen.get("algorithm.rollout_correction")
    within = correction if correction is not None and demands.correct_within else None
    weighted = (
        correction is not None
        and demands.correct_before
        and "rollout_is_weights" in correction.provides()
        # A loss with a ratio to the rollout policy corrects for it itself.
        and "rollout_log_probs" not in loss.requires()
    )
    requires = set(loss.requires()) | loss.cls.prepares(loss.config)
    requires -= {"entropies"} - loss.cls.prepares(loss.config)
    if kl is not None and kl.coef:
        requires.add("ref_log_probs")
    if within is not None:
        requires |= within.requires()
    if weighted:
        requires.add("rollout_is_weights")
    if demands.from_current:
        requires.discard("old_log_probs")
    return ObjectiveSpec(
        policy_loss=loss.ref,
        loss_aggregation=chosen["algorithm.loss_aggregation"].ref,
        kl=KlTerm(estimator=kl.estimator, coef=kl.coef) if kl is not None and kl.coef else None,
        entropy_coef=config.algorithm.entropy.coef,
        measure_entropy=config.algorithm.entropy.measure,
        old_log_probs_from_current=demands.from_current,
        correction=within.ref if within is not None else None,
        weighted=weighted,
        requires=frozenset(requires),
    )


def _gate_columns(rollout: Chosen) -> tuple[str, ...]:
    capabilities = rollout.cls.capabilities
    if "logprobs" not in capabilities:
        return ()
    return tuple(column for column, needed in ROLLOUT_ON_REQUEST.items() if needed in capabilities)


def _check_group_size(config: RunConfig, estimator: Chosen) -> None:
    cls: Any = estimator.cls
    least = cls.min_group_size(estimator.config)
    if config.rollout.n < least:
        raise PlanError(
            f"{estimator.title} compares the samples of one prompt and needs at least {least} of "
            f"them, but rollout.n is {config.rollout.n}",
            hint=f"set rollout.n={max(least, 8)}, or choose an estimator that needs no groups, "
            "such as algorithm.advantage=reinforce_plus_plus",
        )
