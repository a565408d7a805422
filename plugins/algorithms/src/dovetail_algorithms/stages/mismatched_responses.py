"""MismatchedResponses: log-ratios of policy and reference for responses to other prompts, from which KTO estimates the divergence."""

from __future__ import annotations

import numpy as np

from dovetail.batch import Batch, Column
from dovetail.interfaces import PlanFacts, PluginConfig, Stage, StepContext


class MismatchedResponses(Stage):
    """Scores responses under another sample's prompt, for the KL estimate of the objective `kto`; runs before the step's updates.

    Each prompt is followed by the previous sample's response, and the first prompt by the last sample's response. The column
    `mismatched_log_ratios` has the log-ratio of policy and reference for each of these responses.
    """

    name = "mismatched_responses"
    api = ">=1.0,<2"
    phase = "score"
    columns = (
        Column(
            "mismatched_log_ratios",
            "float32",
            "dense",
            "Σ_t log π − log π_ref of a response to another prompt, in nats",
            "mismatched_responses",
        ),
    )

    @classmethod
    def requires(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        read = {"prompt_ids", "response_ids", "response_mask", "temperature"}
        return frozenset(read | {"group_id", "sample_index"})

    @classmethod
    def provides(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"mismatched_log_ratios"})

    @classmethod
    def roles(cls, config: PluginConfig, facts: PlanFacts) -> tuple[str, ...]:
        role, _ = facts.reference
        return ("actor",) if role == "actor" else ("actor", role)

    def run(self, batch: Batch, step: StepContext) -> Batch:
        order_N = np.lexsort((batch["sample_index"], batch["group_id"]))
        previous_N = np.empty_like(order_N)
        previous_N[order_N] = np.roll(order_N, 1)
        responses = batch.select(["response_ids", "response_mask"]).take(previous_N)
        mismatched = batch.select(["prompt_ids", "temperature"]).with_columns(responses.columns)
        role, output = step.facts.reference
        wanted = {"actor": {"log_probs"}}
        wanted.setdefault(role, set()).add(output)
        scored = {
            name: step.roles[name].forward(mismatched, frozenset(outputs)).result()
            for name, outputs in wanted.items()
        }
        log_probs, reference = scored["actor"]["log_probs"], scored[role][output]
        ratios_N = log_probs.with_values(log_probs.values - reference.values).sum()
        return batch.with_columns({"mismatched_log_ratios": ratios_N.astype(np.float32)})
