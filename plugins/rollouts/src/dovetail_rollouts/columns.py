"""The columns of a step whose samples are generated, before its first stage."""

from __future__ import annotations

from dovetail.interfaces import ON_REQUEST, PlanFacts
from dovetail_datasets import advice_on_column

ALWAYS = frozenset(
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
OF_EPISODES = frozenset({"turn_ids", "trajectory"})
"""What episodes have besides, where something requires it: not the one response that `single_turn` makes."""
OF_REWARDS = frozenset({"scores", "token_rewards", "reward_components"})
"""What scoring gives."""
BASELINE, LOSS_MASK = "baseline_scores", "loss_mask"


def columns_of(facts: PlanFacts) -> frozenset[str]:
    """Return the columns that a step has."""
    required, columns = facts.required.keys(), set(ALWAYS | OF_REWARDS)
    capabilities = facts.plugins["rollout"].cls.capabilities
    columns |= {c for c, needed in ON_REQUEST.items() if c in required and needed in capabilities}
    if not facts.plugins["rollout.agent_loop"].cls.one_response:
        columns |= OF_EPISODES & required
    columns |= {BASELINE} & required
    if _filters_mask(facts):
        columns.add(LOSS_MASK)
    return frozenset(columns)


def lacks(facts: PlanFacts, column: str) -> tuple[str, str] | None:
    """Return why a step has no such column, and what to do about it; None where generation and scoring never give it."""
    if (fix := advice_on_column(column, "prompts")) is not None:
        why = "generated samples have none"
        return why, f"{fix}; of a rollout's samples a stage of algorithm.stages can write it"
    if column in OF_EPISODES:
        loop = facts.plugins["rollout.agent_loop"].title
        return (
            f"{loop} makes one response a sample, which has no turns",
            "set rollout.agent_loop to a loop of several turns, such as tool_agent, or leave out what requires the column",
        )
    if column in ON_REQUEST:
        engine = facts.plugins["rollout"].title
        return (
            f"{engine} lacks the capability {ON_REQUEST[column]!r}",
            "choose another plugin on one of the two sides",
        )
    return None


def _filters_mask(facts: PlanFacts) -> bool:
    """Whether a sample filter may take the loss of samples."""
    return any(
        plugin.cls.action_of(plugin.config) == "mask"
        for path, plugin in facts.plugins.items()
        if path.startswith("algorithm.sample_filters[")
    )
