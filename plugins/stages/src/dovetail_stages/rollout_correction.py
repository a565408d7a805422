"""CorrectRollout: weights and rejects tokens by the ratio of training to rollout policy, over the whole batch."""

from __future__ import annotations

from dovetail.batch import Batch
from dovetail.interfaces import PlanFacts, PluginConfig, Stage, StepContext
from dovetail.metrics import values
from dovetail_stages.algorithm import correction_of, corrects_before, samples_are_masked
from dovetail_stages.numerics.rollout_correction import correct_batch


class CorrectRollout(Stage):
    """Computes importance weights of training over rollout policy, and rejects tokens where these policies differ too much.

    Runs over the whole batch, before the first update: rejection changes the loss's denominators, and normalising needs every weight.
    """

    name = "rollout_correction"
    api = ">=1.0,<2"
    phase = "transform"

    @classmethod
    def requires(cls, config: PluginConfig, facts: PlanFacts) -> dict[str, str]:
        correction = correction_of(facts)
        assert correction is not None
        columns = {"old_log_probs", "response_mask", *correction.requires()}
        return dict.fromkeys(sorted(columns), correction.title)

    @classmethod
    def provides(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        correction = correction_of(facts)
        assert correction is not None
        return correction.provides() - cls.rewrites(config, facts)

    @classmethod
    def rewrites(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"loss_mask"}) if samples_are_masked(facts) else frozenset()

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        correction = correction_of(facts)
        if correction is None or not corrects_before(facts):
            return None
        return f"algorithm.rollout_correction ({correction.ref.name})"

    def run(self, batch: Batch, step: StepContext) -> Batch:
        batch, metrics = correct_batch(step.plugins["algorithm.rollout_correction"], batch)
        step.metrics |= values(metrics)
        return batch
