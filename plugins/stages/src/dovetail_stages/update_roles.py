"""UpdateRoles: trains the models of `roles` that have an objective."""

from __future__ import annotations

from dovetail.batch import Batch
from dovetail.interfaces import ObjectiveSpec, PlanFacts, PluginConfig, Stage, StepContext
from dovetail.plugins import objective_spec
from dovetail_stages.mini_batches import train_role
from dovetail_stages.wording import with_settings


class UpdateRoles(Stage):
    """Takes the optimizer steps of further roles, one role after another, before the actor's.

    The role's name replaces the prefix of the objective's metrics: for a role `judge`, `critic/value_loss` becomes `judge/value_loss`.
    """

    name = "update_roles"
    api = ">=1.0,<2"
    phase = "update"
    _objectives: dict[str, ObjectiveSpec] | None = None
    """Each role's objective, the same for the whole run; None before the first update."""

    @classmethod
    def requires(cls, config: PluginConfig, facts: PlanFacts) -> dict[str, str]:
        return {
            column: facts.plugins[f"roles.{role}.objective"].title
            for role, objective in cls.objectives(config, facts).items()
            for column in sorted(objective.requires)
        }

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        words = (
            f"{role} minimises {with_settings(facts.plugins[f'roles.{role}.objective'])}"
            for role in cls.roles(config, facts)
        )
        return "; ".join(words) or None

    @classmethod
    def roles(cls, config: PluginConfig, facts: PlanFacts) -> tuple[str, ...]:
        roles = facts.config.roles
        return tuple(role for role, section in roles.items() if section.objective is not None)

    @classmethod
    def objectives(cls, config: PluginConfig, facts: PlanFacts) -> dict[str, ObjectiveSpec]:
        sections = facts.config.roles.items()
        return {
            role: objective_spec(own) for role, s in sections if (own := s.objective) is not None
        }

    def run(self, batch: Batch, step: StepContext) -> Batch:
        self._objectives = self._objectives or self.objectives(self.config, step.facts)
        for role, objective in self._objectives.items():
            section = step.config.roles[role]
            metrics, _ = train_role(
                role,
                batch,
                step,
                objective,
                prompts=section.mini_batch_size or step.config.data.train_batch_size,
                epochs=section.epochs,
            )
            step.metrics |= {f"{role}/{name.partition('/')[2]}": v for name, v in metrics.items()}
        return batch
