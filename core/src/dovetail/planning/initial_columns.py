"""The columns of a step before its first stage: of the rollout and its rewards, or of the dataset's examples."""

from __future__ import annotations

from dovetail.interfaces.stage import PlanFacts
from dovetail.interfaces.trainer import Examples
from dovetail.stages.algorithm import examples_of
from dovetail.stages.rollout_correction import filters_mask
from dovetail.stages.sampling import ON_REQUEST

ROLLOUT_COLUMNS = frozenset(
    [
        "sample_id",
        "epoch",
        "prompt_id",
        "attempt",
        "sample_index",
        "group_id",
        "trajectory_id",
        "sequence_index",
        "data_source",
        "prompt_ids",
        "response_ids",
        "response_mask",
        "token_weight_versions",
        "finish_reason",
        "temperature",
    ]
)
"""What every rollout gives without being asked."""
EXAMPLE_COLUMNS = ROLLOUT_COLUMNS - {
    "sequence_index",
    "token_weight_versions",
    "finish_reason",
}
"""What a dataset's examples have."""
LABEL_COLUMNS: dict[Examples, frozenset[str]] = {
    "preferences": frozenset({"pair_id", "chosen", "margin"}),
    "unpaired_preferences": frozenset({"desirable"}),
}
"""What examples of a kind have besides; `margin` where the dataset has it and something requires it."""
EPISODE_COLUMNS = frozenset({"turn_ids", "trajectory"})
"""What episodes have besides, where something requires it: not the one response that `single_turn` makes."""
REWARD_COLUMNS = frozenset({"scores", "token_rewards", "reward_components"})
"""What scoring gives."""
OF_ROLLOUTS = ROLLOUT_COLUMNS | EPISODE_COLUMNS | REWARD_COLUMNS | ON_REQUEST.keys()
"""All that a step may have because its samples are generated."""


def initial_columns(facts: PlanFacts) -> frozenset[str]:
    """Return the columns of a step's batch before its first stage."""
    kind = examples_of(facts)
    if kind != "prompts":
        labels = LABEL_COLUMNS.get(kind, frozenset())
        return EXAMPLE_COLUMNS | (labels - ({"margin"} - facts.required.keys()))
    columns = set(ROLLOUT_COLUMNS | REWARD_COLUMNS)
    capabilities = facts.plugins["rollout"].cls.capabilities
    columns |= {
        column
        for column, needed in ON_REQUEST.items()
        if column in facts.required and needed in capabilities
    }
    if not facts.plugins["rollout.agent_loop"].cls.one_response:
        columns |= EPISODE_COLUMNS & facts.required.keys()
    if "baseline_scores" in facts.required:
        columns.add("baseline_scores")
    if filters_mask(facts):
        columns.add("loss_mask")
    return frozenset(columns)
