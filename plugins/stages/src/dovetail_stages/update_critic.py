"""UpdateCritic: trains the value function on this step's returns."""

from __future__ import annotations

from dovetail.batch import Batch
from dovetail.interfaces import ObjectiveSpec, PlanFacts, PluginConfig, Stage, StepContext
from dovetail.plugins import objective_spec
from dovetail_stages.algorithm import uses_critic
from dovetail_stages.mini_batches import train_role
from dovetail_stages.wording import with_settings


class UpdateCritic(Stage):
    """Takes the critic's optimizer steps, before the actor's."""

    name = "update_critic"
    api = ">=1.0,<2"
    phase = "update"
    _spec: ObjectiveSpec | None = None
    """The critic's objective, the same for the whole run; None before the first update."""

    @classmethod
    def requires(cls, config: PluginConfig, facts: PlanFacts) -> dict[str, str]:
        if facts.config.critic.objective is not None:
            return dict.fromkeys(sorted(critic_objective(facts).requires), "the critic")
        return dict.fromkeys(("values", "returns", "response_mask"), "the critic")

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        if not uses_critic(facts):
            return None
        if facts.config.critic.objective is not None:
            return f"the critic minimises {with_settings(facts.plugins['critic.objective'])}"
        clip = facts.config.critic.value_clip
        bound = "unclipped" if clip is None else f"value_clip {clip:g}"
        aggregation = with_settings(facts.plugins["critic.loss_aggregation"])
        return f"the critic follows the returns; {bound}, {aggregation}"

    @classmethod
    def roles(cls, config: PluginConfig, facts: PlanFacts) -> tuple[str, ...]:
        return ("critic",)

    @classmethod
    def objectives(cls, config: PluginConfig, facts: PlanFacts) -> dict[str, ObjectiveSpec]:
        return {"critic": critic_objective(facts)}

    def run(self, batch: Batch, step: StepContext) -> Batch:
        critic, actor, data = step.config.critic, step.config.actor, step.config.data
        self._spec = self._spec or critic_objective(step.facts)
        metrics, _ = train_role(
            "critic",
            batch,
            step,
            self._spec,
            prompts=critic.mini_batch_size or actor.mini_batch_size or data.train_batch_size,
            epochs=critic.epochs or actor.epochs,
        )
        step.metrics |= metrics
        return batch


def critic_objective(facts: PlanFacts) -> ObjectiveSpec:
    """Return the critic's objective."""
    if (own := facts.config.critic.objective) is not None:
        return objective_spec(own)
    return objective_spec(
        facts.plugins["critic.objective"].config,
        loss_aggregation=facts.plugins["critic.loss_aggregation"].config,
        clip=facts.config.critic.value_clip,
    )
