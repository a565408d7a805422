"""ScoreCritic: the critic's forward pass before the update."""

from __future__ import annotations

from dovetail.batch import Batch
from dovetail.interfaces import PlanFacts, PluginConfig, Stage, StepContext
from dovetail_stages.algorithm import uses_critic
from dovetail_stages.forward_pass import forward

VALUE_HEAD = "value_head"
"""The capability of an engine that can train a critic."""


class ScoreCritic(Stage):
    """Computes the value of the state before every response token."""

    name = "score_critic"
    api = ">=1.0,<2"
    phase = "score"

    @classmethod
    def provides(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        able = VALUE_HEAD in facts.engine("critic").cls.capabilities
        return frozenset({"values"}) if able else frozenset()

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        return f"values required by {facts.required['values']}" if uses_critic(facts) else None

    @classmethod
    def roles(cls, config: PluginConfig, facts: PlanFacts) -> tuple[str, ...]:
        return ("critic",)

    def run(self, batch: Batch, step: StepContext) -> Batch:
        return forward(batch, step, "critic", {"values": "values"})
