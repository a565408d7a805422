"""UpdateActor: trains the policy on this step's advantages."""

from __future__ import annotations

import attrs

from dovetail.batch import Batch
from dovetail.interfaces import ObjectiveSpec, PlanFacts, PluginConfig, Stage, StepContext
from dovetail.plugins import objective_spec
from dovetail_stages.algorithm import (
    correction_of,
    corrects_before,
    corrects_within,
    current_is_old,
    rollout_is_old,
    samples_are_masked,
    uses_critic,
)
from dovetail_stages.mini_batches import train_role
from dovetail_stages.wording import clips, update_words

CONTROLLER = "algorithm.kl.in_loss.controller"


class UpdateActor(Stage):
    """Takes the actor's optimizer steps; none while the critic warms up."""

    name = "update_actor"
    api = ">=1.0,<2"
    phase = "update"
    after = ("update_critic",)
    _spec: ObjectiveSpec | None = None
    """The objective with the config's KL weight, the same for the whole run; None before the first update."""

    @classmethod
    def requires(cls, config: PluginConfig, facts: PlanFacts) -> dict[str, str]:
        if facts.config.actor.objective is not None:
            title = facts.plugins["actor.objective"].title
            return dict.fromkeys(sorted(actor_objective(facts).requires), title)
        loss, correction = facts.plugins["algorithm.policy_loss"], correction_of(facts)
        columns = {"advantages", "response_mask"} | _columns_of_loss(facts)
        readers = dict.fromkeys(sorted(columns), loss.title)
        if _has_kl(facts):
            readers["ref_log_probs"] = "algorithm.kl.in_loss"
        if correction is not None and corrects_within(facts):
            readers |= dict.fromkeys(sorted(correction.requires()), correction.title)
        if correction is not None and corrects_before(facts):
            made = (
                correction.provides() if _weighted(facts) else correction.provides() & {"loss_mask"}
            )
            readers |= dict.fromkeys(sorted(made), correction.title)
        if samples_are_masked(facts):
            readers["loss_mask"] = "algorithm.sample_filters"
        return readers

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        because = f"{update_words(facts)}; every step"
        if warmup := _warmup_steps(facts):
            because += f" after the critic's {warmup} steps of warm-up"
        if facts.config.actor.objective is not None:
            return because
        loss = facts.plugins["algorithm.policy_loss"]
        if current_is_old(facts) and "old_log_probs" in loss.requires():
            because += "; one update a rollout, so no pass for old log-probabilities"
            if clips(loss):
                because += ": every ratio is 1, and no clip acts"
        if rollout_is_old(facts):
            because += "; the rollout policy is the old one, so no pass for old log-probabilities"
        return because

    @classmethod
    def roles(cls, config: PluginConfig, facts: PlanFacts) -> tuple[str, ...]:
        return ("actor",)

    @classmethod
    def objectives(cls, config: PluginConfig, facts: PlanFacts) -> dict[str, ObjectiveSpec]:
        return {"actor": actor_objective(facts)}

    def skips(self, batch: Batch, step: StepContext) -> bool:
        return step.number <= _warmup_steps(step.facts)

    def run(self, batch: Batch, step: StepContext) -> Batch:
        config = step.config
        metrics, stopped = train_role(
            "actor",
            with_loss_mask(batch),
            step,
            self._objective(step),
            prompts=config.actor.mini_batch_size or config.data.train_batch_size,
            epochs=config.actor.epochs,
            max_kl=config.actor.max_kl,
        )
        step.metrics |= metrics
        if config.actor.max_kl is not None:
            step.metrics["actor/early_stop"] = float(stopped)
        return batch

    def step_counted(self, batch: Batch, step: StepContext) -> None:
        """Pass the step's KL to the controller of the KL loss's coefficient, if the policy was updated."""
        if step.updates["actor"] and _has_kl(step.facts) and "actor/kl" in step.metrics:
            step.metrics["actor/kl_coef"] = self._objective(step).scalars["kl_coef"]
            step.plugins[CONTROLLER].update(step.metrics["actor/kl"], len(batch))

    def _objective(self, step: StepContext) -> ObjectiveSpec:
        """Return the objective of this step, with the KL weight multiplied by its controller's factor."""
        self._spec = self._spec or actor_objective(step.facts)
        objective = self._spec
        if not _has_kl(step.facts):
            return objective
        coef = objective.scalars["kl_coef"] * step.plugins[CONTROLLER].value
        return attrs.evolve(objective, scalars={**objective.scalars, "kl_coef": coef})


def actor_objective(facts: PlanFacts) -> ObjectiveSpec:
    """Return the actor's objective, with the KL weight of the config."""
    if (own := facts.config.actor.objective) is not None:
        return objective_spec(own)
    algorithm, loss = facts.config.algorithm, facts.plugins["algorithm.policy_loss"]
    correction, kl = correction_of(facts), algorithm.kl.in_loss
    within = correction if correction is not None and corrects_within(facts) else None
    entropy, coef = algorithm.entropy, kl.coef if kl is not None else 0.0
    return objective_spec(
        facts.plugins["actor.objective"].config,
        scalars={"kl_coef": coef, "entropy_coef": entropy.coef},
        policy_loss=loss.config,
        loss_aggregation=facts.plugins["algorithm.loss_aggregation"].config,
        correction=within.config if within is not None else None,
        kl=kl.estimator if kl is not None and _has_kl(facts) else None,
        entropy=entropy.measure or bool(entropy.coef),
        old_log_probs_from_current=current_is_old(facts) and "old_log_probs" in loss.requires(),
        weighted=_weighted(facts),
    )


def with_loss_mask(batch: Batch) -> Batch:
    """Return the batch with `loss_mask`, if it has one, in place of `response_mask`."""
    if "loss_mask" not in batch:
        return batch
    return batch.with_columns({"response_mask": batch["loss_mask"]}).drop(["loss_mask"])


def _columns_of_loss(facts: PlanFacts) -> frozenset[str]:
    """Return the columns that the loss reads, except entropies and current log-probabilities, which the update itself computes."""
    loss = facts.plugins["algorithm.policy_loss"]
    prepared: frozenset[str] = loss.cls.prepares(loss.config)
    columns = (loss.requires() - {"entropies"}) | prepared
    return columns - {"old_log_probs"} if current_is_old(facts) else columns


def _weighted(facts: PlanFacts) -> bool:
    """Return whether token losses are multiplied by weights that were computed over the whole batch."""
    correction = correction_of(facts)
    return (
        correction is not None
        and corrects_before(facts)
        and "rollout_is_weights" in correction.provides()
        # A loss that reads the rollout's log-probabilities makes the correction itself.
        and "rollout_log_probs" not in facts.plugins["algorithm.policy_loss"].requires()
    )


def _has_kl(facts: PlanFacts) -> bool:
    kl = facts.config.algorithm.kl.in_loss
    return facts.config.actor.objective is None and kl is not None and bool(kl.coef)


def _warmup_steps(facts: PlanFacts) -> int:
    """Return the number of steps, at the start of the run, in which only the critic is trained."""
    return facts.config.critic.warmup_steps if uses_critic(facts) else 0
