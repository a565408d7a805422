"""ScoreRef: the reference policy's forward pass."""

from __future__ import annotations

from dovetail.batch import Batch
from dovetail.interfaces import PlanFacts, PluginConfig, Stage, StepContext
from dovetail_stages.forward_pass import forward
from dovetail_stages.score_actor import reference_is_actor


class ScoreRef(Stage):
    """Computes the log-probability of every response token under the reference policy."""

    name = "score_ref"
    api = ">=1.0,<2"
    phase = "score"

    @classmethod
    def provides(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"ref_log_probs"})

    @classmethod
    def constant(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"ref_log_probs"} if facts.config.ref.update is None else ())

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        if "ref_log_probs" not in facts.required or reference_is_actor(facts):
            return None
        return f"ref_log_probs required by {facts.required['ref_log_probs']}"

    @classmethod
    def roles(cls, config: PluginConfig, facts: PlanFacts) -> tuple[str, ...]:
        return ("ref",)

    def run(self, batch: Batch, step: StepContext) -> Batch:
        return forward(batch, step, "ref", {"ref_log_probs": "log_probs"})
