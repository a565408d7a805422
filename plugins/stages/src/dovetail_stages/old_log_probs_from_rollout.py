"""OldLogProbsFromRollout: the rollout policy as the old policy, which saves the actor's forward pass."""

from __future__ import annotations

from dovetail.batch import Batch
from dovetail.interfaces import PlanFacts, PluginConfig, Stage, StepContext
from dovetail_stages.algorithm import correction_of, rollout_is_old


class OldLogProbsFromRollout(Stage):
    """Copies `rollout_log_probs` to `old_log_probs`, instead of computing them with the trainer.

    The stage runs if the rollout correction has mode `bypass`, which makes the rollout policy the old policy of ratios; or if there is no
    correction, and samples may come from older weights than the trainer's.
    """

    name = "old_log_probs_from_rollout"
    api = ">=1.0,<2"
    phase = "score"

    @classmethod
    def requires(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"rollout_log_probs"})

    @classmethod
    def provides(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"old_log_probs"})

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        if not rollout_is_old(facts) or "old_log_probs" not in facts.required:
            return None
        correction = correction_of(facts)
        why = (
            f"{facts.plugins['trainer'].ref.name} trains on samples of weights up to {facts.age} version(s) old"
            if correction is None
            else f"{correction.ref.name} takes the rollout policy for the old one"
        )
        return f"{why}; required by {facts.required['old_log_probs']}"

    def run(self, batch: Batch, step: StepContext) -> Batch:
        return batch.with_columns({"old_log_probs": batch["rollout_log_probs"]})
