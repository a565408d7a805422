"""The columns that a step of generated samples has before its first stage, and the batch of these samples.

Legend: N sequences (a forked sample has several), T response tokens, packed end to end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import ON_REQUEST, PlanFacts, Sample, Score
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
"""Columns of every rollout, even if no plugin requires them."""
OF_EPISODES = frozenset({"turn_ids", "trajectory"})
"""Columns that episodes add if a plugin requires them; single-response samples don't have these columns."""
OF_REWARDS = frozenset({"scores", "token_rewards", "reward_components"})
"""Columns that scoring provides."""
BASELINE, LOSS_MASK = "baseline_scores", "loss_mask"


def columns_of(facts: PlanFacts) -> frozenset[str]:
    """Return the names of the batch columns that a step has before its first stage."""
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
    """Return why the samples of a step lack a column, and the fix; None for a column that only a stage can provide."""
    if (fix := advice_on_column(column, "prompts")) is not None:
        why = "generated samples don't have this column"
        return (
            why,
            f"{fix}; for generated samples, add a stage to algorithm.stages that writes the column",
        )
    if column in OF_EPISODES:
        loop = facts.plugins["rollout.agent_loop"].title
        return (
            f"the samples of {loop} are single responses, which have no turns",
            "set rollout.agent_loop to a loop with turns, such as tool_agent, or remove the plugin that requires the column",
        )
    if column in ON_REQUEST:
        engine = facts.plugins["rollout"].title
        return (
            f"{engine} lacks the capability {ON_REQUEST[column]!r}",
            "choose a rollout with that capability (`dovetail plugins list rollout`), or remove the plugin that requires the column",
        )
    return None


def to_batch(
    samples: Sequence[Sample],
    *,
    temperature: float,
    baselines: Mapping[int, Sample] | None = None,
    columns: Collection[str] = (),
) -> Batch:
    """Return a batch of the samples that have a score, one row for each sequence of a sample; failed samples are left out.

    In `token_rewards`, a scalar reward is assigned to the last token that the policy produced in the sample's last sequence.
    `trajectory_id` is the sample's index among the samples of the batch. `sample_id` is unique in each row: from the second sequence of a
    sample on, it is the sample's id with `.q1`, `.q2`, … appended.

    Args:
        samples: samples in any order; samples with the same `group` answer one prompt.
        temperature: the sampling temperature.
        baselines: the greedy response by group id, for the column `baseline_scores`; None for no such column. A group
            whose greedy response has no score is left out.
        columns: the columns of episodes to add: `turn_ids`, `trajectory`.
    """
    scored = [
        s
        for s in samples
        if isinstance(s.outcome, Score) and (baselines is None or has_baseline(s, baselines))
    ]
    rows = [(s, number, c) for s in scored for number, c in enumerate(s.sequences)]
    of_samples, completions = [s for s, _, _ in rows], [c for _, _, c in rows]
    responses = Ragged.from_list([c.response_ids for c in completions], dtype=np.int64)
    found: dict[str, Any] = {
        "sample_id": [f"{s.sample_id}.q{i}" if i else s.sample_id for s, i, _ in rows],
        "epoch": np.array([s.prompt.epoch for s in of_samples], dtype=np.int64),
        "prompt_id": np.array([s.prompt.index for s in of_samples], dtype=np.int64),
        "attempt": np.array([s.prompt.attempt for s in of_samples], dtype=np.int64),
        "sample_index": np.array([c.sample for c in completions], dtype=np.int64),
        "group_id": np.array([s.group for s in of_samples], dtype=np.int64),
        "trajectory_id": np.repeat(
            np.arange(len(scored), dtype=np.int64), [len(s.sequences) for s in scored]
        ),
        "sequence_index": np.array([number for _, number, _ in rows], dtype=np.int64),
        "data_source": [s.prompt.data_source for s in of_samples],
        "prompt_ids": Ragged.from_list(
            [s.prompt.prompt_ids if c.prompt_ids is None else c.prompt_ids for s, _, c in rows],
            dtype=np.int64,
        ),
        "response_ids": responses,
        "response_mask": responses.with_values(
            np.concatenate([np.zeros(0, np.bool_), *(c.produced_T for c in completions)])
        ),
        "token_weight_versions": Ragged.from_list(
            [c.weight_versions for c in completions], dtype=np.int64
        ),
        "finish_reason": [str(c.finish_reason) for c in completions],
        "temperature": np.full(len(rows), temperature, dtype=np.float32),
        "scores": np.array([s.score for s in of_samples], dtype=np.float32),
        "token_rewards": responses.with_values(
            np.concatenate([np.zeros(0, np.float32), *map(_token_rewards, scored)])
        ),
        "reward_components": [dict(s.outcome.components) for s in of_samples],  # type: ignore[union-attr]
    }
    if any(s.prompt.media for s in scored):
        found["media"] = [[m.as_json() for m in s.prompt.media] for s in of_samples]
    if "turn_ids" in columns:
        found["turn_ids"] = responses.with_values(
            np.concatenate([np.zeros(0, np.int64), *map(_turn_ids, scored)])
        )
    if "trajectory" in columns:
        told = [None if s.trajectory is None else s.trajectory.as_json() for s in scored]
        found["trajectory"] = [told[number] for number in found["trajectory_id"]]
    if baselines is not None:
        found["baseline_scores"] = np.array(
            [baselines[s.group].score for s in of_samples], dtype=np.float32
        )
    for column, field in (
        ("rollout_log_probs", "log_probs"),
        ("raw_rollout_log_probs", "raw_log_probs"),
    ):
        values = [getattr(c, field) for c in completions]
        if values and all(row is not None for row in values):
            found[column] = Ragged.from_list(values, dtype=np.float32)
    return Batch(found)


def has_baseline(sample: Sample, baselines: Mapping[int, Sample]) -> bool:
    """Return whether the greedy response to the sample's prompt has a score."""
    return sample.group in baselines and baselines[sample.group].score is not None


def _filters_mask(facts: PlanFacts) -> bool:
    """Return whether a sample filter may mask samples."""
    return any(
        plugin.cls.action_of(plugin.config) == "mask"
        for path, plugin in facts.plugins.items()
        if path.startswith("algorithm.sample_filters[")
    )


def _token_rewards(sample: Sample) -> Float32[np.ndarray, "T"]:
    outcome = sample.outcome
    assert isinstance(outcome, Score)
    if outcome.token_rewards is not None:
        return outcome.token_rewards.astype(np.float32, copy=False)
    produced_T = sample.produced_T
    rewards_T = np.zeros(len(produced_T), dtype=np.float32)
    rewards_T[np.flatnonzero(produced_T)[-1:]] = outcome.value
    return rewards_T


def _turn_ids(sample: Sample) -> Int64[np.ndarray, "T"]:
    """Return the index of the turn that produced each token of a sample's sequences; −1 for tokens that the policy did not produce."""
    ids_T = np.where(sample.produced_T, 0, -1)
    starts_S = np.cumsum([0, *(len(c.response_ids) for c in sample.sequences)])
    for number, turn in enumerate(sample.trajectory.turns if sample.trajectory else ()):
        start = starts_S[turn.sequence]
        ids_T[start + turn.start : start + turn.stop] = number
    return ids_T
