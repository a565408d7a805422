"""Samples to columns: the batch of a step, and its figures. N sequences, of one sample each or of samples that were forked, T response
tokens, packed end to end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import EpisodeEnd, Failure, Sample, Score, Tokenizer
from dovetail_rollouts.reward_signals import distribution, reward_signals


def to_batch(
    samples: Sequence[Sample],
    *,
    temperature: float,
    baselines: Mapping[int, Sample] | None = None,
    columns: Collection[str] = (),
) -> Batch:
    """Return the columns of the samples that have a score, a row for each of their sequences; failures have no place in a batch.

    A scalar reward sits on the last token that the policy produced in the last sequence. `trajectory_id` is the sample's position
    among those that have a place in the batch. `sample_id` is unique: that of a sequence after the first has its number behind it.

    Args:
        samples: in any order; samples of one `group` answer one prompt.
        temperature: at which they were drawn.
        baselines: the greedy response of each group, which gives the column `baseline_scores`. A sample of a
            group whose baseline has no score has no place in the batch either.
        columns: of episodes, which are there where they are named: `turn_ids`, `trajectory`.
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
    """Of each token of all sequences, the turn that produced it; −1 where the policy did not."""
    ids_T = np.where(sample.produced_T, 0, -1)
    starts_S = np.cumsum([0, *(len(c.response_ids) for c in sample.sequences)])
    for number, turn in enumerate(sample.trajectory.turns if sample.trajectory else ()):
        start = starts_S[turn.sequence]
        ids_T[start + turn.start : start + turn.stop] = number
    return ids_T


def rollout_metrics(
    samples: Sequence[Sample], max_response_length: int, baselines: Sequence[Sample] = ()
) -> dict[str, float]:
    """Return figures of one step's samples, in the field's names; rewards as scored, before any shaping.

    Args:
        samples: all that were generated, trained on or not; at least one. Lengths count tokens that the policy produced.
        max_response_length: tokens.
        baselines: the greedy responses, which count in `reward/baseline_…` alone.
    """
    completions = [s.completion for s in samples if s.completion]
    lengths = np.array([s.response_length for s in samples if s.completion], np.float64)
    prompts = np.array([len(s.prompt.prompt_ids) for s in samples], dtype=np.float64)
    clipped = np.array([str(c.finish_reason) == "length" for c in completions])
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": float(clipped.mean()),
        "response_length/limit": float(max_response_length),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
        **_reward_metrics(samples),
        **reward_signals(samples),
        **_episode_metrics(samples),
        **_baseline_metrics(baselines),
    }


def token_row(
    sample: Sample, tokenizer: Tokenizer, *, episodes_only: bool = True
) -> dict[str, Any]:
    """Return the tokens of a sample as files of samples have them, under `tokens`.

    Args:
        sample: with its completion.
        tokenizer: of the run.
        episodes_only: whether to return nothing where the sample is one response.

    Returns:
        `text` of each token alone, `mask` (1 where the policy produced it), and the rollout's `log_probs` in nats, None where the mask
        is 0; these only where the engine gave them. Each is a list of T, of all sequences end to end. Where there are several,
        `sequences` has of each its length in tokens and, after the first, the text of its prompt.
    """
    if not sample.sequences or (episodes_only and sample.trajectory is None):
        return {}
    ids_T = sample.response_ids.tolist()
    # After another token: some tokenizers drop the space before the first word that they decode.
    before = list(tokenizer("a", add_special_tokens=False)["input_ids"])[-1:]
    start = str(tokenizer.decode(before))
    texts = {
        token: str(tokenizer.decode([*before, token])).removeprefix(start) for token in set(ids_T)
    }
    tokens: dict[str, Any] = {
        "text": [texts[token] for token in ids_T],
        "mask": sample.produced_T.astype(int).tolist(),
    }
    given = [c.raw_log_probs if c.log_probs is None else c.log_probs for c in sample.sequences]
    known = [log_probs_T for log_probs_T in given if log_probs_T is not None]
    if len(known) == len(given):
        tokens["log_probs"] = [
            round(value, 4) if produced else None
            for value, produced in zip(np.concatenate(known).tolist(), tokens["mask"], strict=True)
        ]
    if sample.earlier:
        tokens["sequences"] = [
            {
                "length": len(c.response_ids),
                "prompt": ""
                if c.prompt_ids is None
                else str(tokenizer.decode(c.prompt_ids.tolist(), skip_special_tokens=False)),
            }
            for c in sample.sequences
        ]
    return {"tokens": tokens}


def _reward_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    outcomes = [s.outcome for s in samples]
    scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    metrics = {
        "reward/failures": float(len(failures)),
        "reward/failure_share": len(failures) / len(samples),
    }
    if scores:
        rewards_N = np.array([score.value for score in scores], dtype=np.float64)
        metrics |= {
            "reward/mean": float(rewards_N.mean()),
            "reward/std": float(rewards_N.std()),
            "reward/min": float(rewards_N.min()),
            "reward/max": float(rewards_N.max()),
            "reward/p10": float(np.percentile(rewards_N, 10)),
            "reward/p90": float(np.percentile(rewards_N, 90)),
        }
    for name in sorted({name for score in scores for name in score.components}):
        if _told_by_its_scorer(name, scores):
            continue
        parts = [score.components[name] for score in scores if name in score.components]
        metrics[f"reward/components/{name}"] = float(np.mean(parts))
        metrics |= distribution(name, np.array(parts, np.float64))
    for kind in sorted({failure.kind for failure in failures}):
        count = sum(failure.kind == kind for failure in failures)
        metrics[f"reward/failures/{kind}"] = float(count)
    return metrics


def _told_by_its_scorer(name: str, scores: Sequence[Score]) -> bool:
    """Whether a component `format/format`, a scorer's part of the same name, is the component `format` in every sample."""
    scorer, _, part = name.rpartition("/")
    if not scorer or scorer.rpartition("/")[2] != part:
        return False
    return all(
        score.components[name] == score.components.get(scorer)
        for score in scores
        if name in score.components
    )


def _episode_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Figures of episodes: turns, calls, tokens that the policy was shown, how they ended, and what agent loops counted; nothing
    where there are none.
    """
    episodes = [(s.trajectory, s) for s in samples if s.trajectory and s.completion]
    if not episodes:
        return {}
    trajectories = [trajectory for trajectory, _ in episodes]
    turns_N = np.array([len(t.turns) for t in trajectories], np.float64)
    shown_N = np.array([np.count_nonzero(~s.produced_T) for _, s in episodes], np.float64)
    sequences_N = np.array([len(s.sequences) for _, s in episodes], np.float64)
    ends = Counter(str(trajectory.end) for trajectory in trajectories)
    counted = sorted({name for t in trajectories for name in t.counts})
    return {
        **{
            f"episode/{name}": float(np.mean([t.counts.get(name, 0.0) for t in trajectories]))
            for name in counted
        },
        "episode/turns/mean": float(turns_N.mean()),
        "episode/turns/max": float(turns_N.max()),
        "episode/sequences/mean": float(sequences_N.mean()),
        "episode/calls/mean": float(np.mean([len(t.calls) for t in trajectories])),
        "episode/observed_tokens/mean": float(shown_N.mean()),
        "episode/seconds/mean": float(np.mean([t.seconds for t in trajectories])),
        "episode/seconds/max": float(max(t.seconds for t in trajectories)),
        **{f"episode/end/{end}": ends[end] / len(episodes) for end in EpisodeEnd},
    }


def _baseline_metrics(baselines: Sequence[Sample]) -> dict[str, float]:
    if not baselines:
        return {}
    scores = [s.score for s in baselines if s.score is not None]
    metrics = {"reward/baseline_failures": float(len(baselines) - len(scores))}
    if scores:
        metrics["reward/baseline_mean"] = float(np.mean(scores))
    return metrics
