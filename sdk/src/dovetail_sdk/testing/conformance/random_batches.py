"""Random batches for the suites: every column holds values that a real run could have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dovetail.batch import Batch, Column, Ragged
from dovetail.batch.columns import glossary
from dovetail.interfaces import EpisodeEnd, FinishReason, Trajectory, Turn


def random_batch(
    required: Iterable[str],
    *,
    seed: int,
    groups: int = 5,
    n: int = 4,
    declared: Iterable[Column] = (),
    component_names: tuple[str, ...] = ("accuracy", "format"),
) -> Batch:
    """Return a random batch of groups × n samples of 0 to 12 tokens; a fifth of the tokens are masked, as tool output would be.

    Args:
        required: columns to add to `group_id`, `scores`, `token_rewards` and `response_mask`.
        seed: the random seed.
        groups: number of prompts.
        n: the number of samples per prompt.
        declared: columns that the plugin declares; floats are drawn from a normal distribution, objects are None.
        component_names: names of the reward components, used if `reward_components` is required.

    Raises:
        ColumnError: the plugin redefines a column.
    """
    rng = np.random.default_rng(seed)
    size = groups * n
    lengths = rng.integers(1, 13, size)
    # One response is empty, but not in the first group, whose tokens some tests read.
    lengths[min(n, size - 1)] = 0
    mask = Ragged.from_list([rng.random(k) < 0.8 for k in lengths], dtype=np.bool_)
    columns: dict[str, Any] = {
        "group_id": np.repeat(np.arange(groups), n),
        "response_mask": mask,
    }
    known = glossary(declared)
    for name in sorted(set(required) - {"scores", "token_rewards", *columns}):
        if name == "reward_components":
            columns[name] = [dict.fromkeys(component_names, 0.0) for _ in range(size)]
        elif name == "turn_ids":  # a turn begins where the policy writes after an observation
            turns = [np.where(row, (~row).cumsum(), -1) for row in mask]
            columns[name] = Ragged.from_list(turns, dtype=np.int64)
        else:
            columns[name] = draw(known[name], mask, rng)
    if {"sum_pi_squared", "old_log_probs"} <= columns.keys():
        columns["sum_pi_squared"] = _possible(columns["sum_pi_squared"], columns["old_log_probs"])
    return with_scores(Batch(columns), rng.normal(size=size).astype(np.float32))


def with_scores(batch: Batch, scores_N: np.ndarray) -> Batch:
    """Return the batch with new rewards, set as scores, as token rewards on the policy's last token, and as components.

    Args:
        batch: a batch with `response_mask`.
        scores_N: the new rewards, float32 [N].
    """
    mask = batch["response_mask"]
    rewards_T = np.zeros(len(mask.values), np.float32)
    for row, score in enumerate(scores_N):
        own = np.flatnonzero(mask[row])
        if own.size:
            rewards_T[mask.offsets[row] + own[-1]] = score
    columns: dict[str, Any] = {"scores": scores_N, "token_rewards": mask.with_values(rewards_T)}
    if "reward_components" in batch:
        columns["reward_components"] = [
            {name: float(score) * (-0.5) ** k for k, name in enumerate(row)}
            for row, score in zip(batch["reward_components"], scores_N, strict=True)
        ]
    return batch.with_columns(columns)


def without_tokens(batch: Batch) -> Batch:
    """Return the batch with empty responses."""
    return batch.with_columns(
        {
            name: Ragged.from_list([[]] * len(batch), dtype=column.dtype, inner=column.inner)
            for name, column in along_responses(batch).items()
        }
    )


def along_responses(batch: Batch) -> dict[str, Ragged]:
    """Return the ragged columns over response tokens (not prompt tokens), [N, T, …] each."""
    return {
        name: column
        for name, column in batch.columns.items()
        if isinstance(column, Ragged) and name != "prompt_ids"
    }


def draw(column: Column, mask: Ragged, rng: np.random.Generator) -> Any:
    """Return random values of a column: [N, …], or ragged [N, T, …] over response tokens; masked tokens hold 0.

    Boolean columns are true for every other sample or token. A column of objects holds None.

    Args:
        column: the column, whose shape and dtype the values have.
        mask: the response mask, with a row for each sample.
        rng: the random generator.
    """
    if column.shape == "object":
        return [None] * len(mask)
    count = len(mask) if column.shape == "dense" else len(mask.values)
    values = _MAKERS.get(column.name, _normal)(rng, (count, *inner_of(column)))
    if column.dtype == "bool":
        values = np.broadcast_to(beside(np.arange(count) % 2 == 0, values), values.shape)
    values = values.astype(column.dtype)
    if column.shape == "dense":
        return values
    return mask.with_values(np.where(beside(mask.values, values), values, values.dtype.type(0)))


def random_trajectory(rng: np.random.Generator) -> dict[str, Any]:
    """Return a random episode of 1 to 3 turns as JSON values; some turns have tool calls, and some episodes end at a limit."""
    call = {"id": "0", "type": "function", "function": {"name": "add", "arguments": {}}}
    turns = tuple(
        Turn(
            start=2 * number,
            stop=2 * number + 1,
            text=str(rng.choice(["", "the answer"])),
            finish_reason=FinishReason(rng.choice(["stop", "length"])),
            calls=(call,) * int(rng.integers(2)),
            reward=float(rng.integers(2)),
        )
        for number in range(rng.integers(1, 4))
    )
    return Trajectory(turns=turns, end=EpisodeEnd(rng.choice(list(EpisodeEnd)))).as_json()


def inner_of(column: Column) -> tuple[int, ...]:
    """Return the shape of one value of the column, with size 3 for each dimension whose size varies between runs."""
    return tuple(3 if size is None else size for size in column.inner)


def beside(flags_T: Any, values: Any) -> Any:
    """Return flags [T], an array or a tensor, reshaped to broadcast with values [T, …]."""
    return flags_T.reshape(-1, *(1,) * (values.ndim - 1))


def _possible(shares: Ragged, log_probs: Ragged) -> Ragged:
    """Return values of Σπ², the sum of squared probabilities over the vocabulary, that agree with each sampled token's probability.

    Args:
        shares: numbers from 0 to 1, ragged [T]: 0 for the least possible sum, 1 for the greatest.
        log_probs: log-probabilities of the sampled tokens, ragged [T].
    """
    pi_T = np.exp(log_probs.values)
    return shares.with_values(np.square(pi_T) + shares.values * np.square(1 - pi_T))


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape)


def _log_probs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.log(rng.uniform(0.05, 1.0, shape))


_MAKERS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "old_log_probs": _log_probs,
    "rollout_log_probs": _log_probs,
    "raw_rollout_log_probs": _log_probs,
    "ref_log_probs": _log_probs,
    "entropies": lambda rng, shape: rng.uniform(0.0, 3.0, shape),
    "sum_pi_squared": lambda rng, shape: rng.uniform(0.0, 1.0, shape),
    "rollout_is_weights": lambda rng, count: rng.uniform(0.5, 2.0, count),
    "temperature": lambda _, count: np.ones(count),
}
"""Column of core → function of a generator and a shape that draws its values, for columns in which not every number makes sense. Other
columns are drawn from a normal distribution."""
