"""ScoreActor: the actor's forward pass before the update, for all its columns that plugins require."""

from __future__ import annotations

from dovetail.batch import Batch
from dovetail.interfaces import PlanFacts, PluginConfig, Stage, StepContext
from dovetail_stages.algorithm import rollout_is_old
from dovetail_stages.forward_pass import forward

OUTPUTS = {
    "old_log_probs": "log_probs",
    "sum_pi_squared": "sum_pi_squared",
    "entropies": "entropies",
    "ref_log_probs": "ref_log_probs",
}
"""Columns that the stage may add to the batch, each with the name of the engine's output that fills the column."""


class ScoreActor(Stage):
    """Computes the columns of `OUTPUTS` that plugins require, with the actor as it is before this step's updates."""

    name = "score_actor"
    api = ">=1.0,<2"
    phase = "score"

    @classmethod
    def provides(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        columns = {column for column in OUTPUTS if column in facts.required}
        if rollout_is_old(facts):
            columns.discard("old_log_probs")
        if not reference_is_actor(facts):
            columns.discard("ref_log_probs")
        return frozenset(columns)

    @classmethod
    def constant(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"ref_log_probs"})

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        columns = sorted(cls.provides(config, facts))
        reasons = [f"{column} required by {facts.required[column]}" for column in columns]
        if "ref_log_probs" in columns:
            reasons.append("ref_log_probs with the actor's adapters off")
        return "; ".join(reasons) or None

    @classmethod
    def roles(cls, config: PluginConfig, facts: PlanFacts) -> tuple[str, ...]:
        return ("actor",)

    def run(self, batch: Batch, step: StepContext) -> Batch:
        columns = self.provides(self.config, step.facts)
        return forward(batch, step, "actor", {column: OUTPUTS[column] for column in columns})


def reference_is_actor(facts: PlanFacts) -> bool:
    """Return whether the actor's engine computes `ref_log_probs` itself, with its adapters off."""
    return facts.reference[0] == "actor"
