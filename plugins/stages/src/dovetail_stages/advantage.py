"""EstimateAdvantages: rewards to advantages and returns, by the chosen estimator."""

from __future__ import annotations

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import Groups, PlanFacts, PluginConfig, Stage, StepContext
from dovetail_stages.checked_estimate import checked_estimate
from dovetail_stages.wording import with_settings

ESTIMATOR = "algorithm.advantage"


class EstimateAdvantages(Stage):
    """Runs the advantage estimator over the whole batch."""

    name = "advantage"
    api = ">=1.0,<2"
    phase = "estimate"

    @classmethod
    def requires(cls, config: PluginConfig, facts: PlanFacts) -> dict[str, str]:
        estimator = facts.plugins[ESTIMATOR]
        columns = {"scores", "token_rewards", "response_mask", "group_id", "trajectory_id"}
        return dict.fromkeys(sorted(columns | estimator.requires()), estimator.title)

    @classmethod
    def provides(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"advantages"} | {"returns"} & facts.plugins[ESTIMATOR].provides())

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        if not facts.required.keys() & {"advantages", "returns"}:
            return None
        return f"{with_settings(facts.plugins[ESTIMATOR], changed_only=True)}; every step"

    def run(self, batch: Batch, step: StepContext) -> Batch:
        groups = Groups.of(batch["group_id"], batch["trajectory_id"])
        result = checked_estimate(step.plugins[ESTIMATOR], batch, groups)
        advantages = result.advantages
        columns = {"advantages": advantages}
        if result.returns is not None and "returns" in self.provides(self.config, step.facts):
            columns["returns"] = result.returns
        flat = advantages.values if isinstance(advantages, Ragged) else advantages
        if len(flat):
            step.metrics |= {
                "advantage/mean": float(flat.mean()),
                "advantage/std": float(flat.std()),
            }
        step.metrics |= result.metrics
        return batch.with_columns(columns)
