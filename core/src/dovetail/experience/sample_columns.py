"""Samples to columns: the batch of a step, and its figures. N samples, T response tokens, packed end to end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from dovetail.batch.batch import Batch
from dovetail.batch.ragged import Ragged
from dovetail.experience.reward_signals import distribution, reward_signals
from dovetail.interfaces.plugin import Tokenizer
from dovetail.interfaces.reward import Failure, Sample, Score
from dovetail.interfaces.trajectory import EpisodeEnd


def to_batch(
    samples: Sequence[Sample],
    *,
    temperature: float,
    baselines: Mapping[int, Sample] | None = None,
) -> Batch:
    """The columns of the samples that have a score; failures have no place in a batch.

    A scalar reward sits on the last token of the response that the policy produced.

    Args:
        samples: in any order; samples of one `group` answer one prompt.
        temperature: at which they were drawn.
        baselines: the greedy response of each group, which gives the column `baseline_scores`. A sample of a
            group whose baseline has no score has no place in the batch either.
    """
    scored = [
        s
        for s in samples
        if isinstance(s.outcome, Score) and (baselines is None or has_baseline(s, baselines))
    ]
    completions = [s.completion for s in scored if s.completion]
    responses = Ragged.from_list([c.response_ids for c in completions], dtype=np.int64)
    columns: dict[str, Any] = {
        "sample_id": [s.sample_id for s in scored],
        "epoch": np.array([s.prompt.epoch for s in scored], dtype=np.int64),
        "prompt_id": np.array([s.prompt.index for s in scored], dtype=np.int64),
        "attempt": np.array([s.prompt.attempt for s in scored], dtype=np.int64),
        "sample_index": np.array([c.sample for c in completions], dtype=np.int64),
        "group_id": np.array([s.group for s in scored], dtype=np.int64),
        "trajectory_id": np.arange(len(scored), dtype=np.int64),
        "data_source": [s.prompt.data_source for s in scored],
        "prompt_ids": Ragged.from_list([s.prompt.prompt_ids for s in scored], dtype=np.int64),
        "response_ids": responses,
        "response_mask": responses.with_values(
            np.concatenate([np.zeros(0, np.bool_), *(c.produced_T for c in completions)])
        ),
        "token_weight_versions": Ragged.from_list(
            [c.weight_versions for c in completions], dtype=np.int64
        ),
        "finish_reason": [str(c.finish_reason) for c in completions],
        "temperature": np.full(len(scored), temperature, dtype=np.float32),
        "scores": np.array([s.score for s in scored], dtype=np.float32),
        "token_rewards": Ragged.from_list([_token_rewards(s) for s in scored], dtype=np.float32),
        "reward_components": [dict(s.outcome.components) for s in scored],  # type: ignore[union-attr]
    }
    if any(s.prompt.media for s in scored):
        columns["media"] = [[m.as_json() for m in s.prompt.media] for s in scored]
    if baselines is not None:
        columns["baseline_scores"] = np.array(
            [baselines[s.group].score for s in scored], dtype=np.float32
        )
    for column, field in (
        ("rollout_log_probs", "log_probs"),
        ("raw_rollout_log_probs", "raw_log_probs"),
    ):
        rows = [getattr(c, field) for c in completions]
        if rows and all(row is not None for row in rows):
            columns[column] = Ragged.from_list(rows, dtype=np.float32)
    return Batch(columns)


def has_baseline(sample: Sample, baselines: Mapping[int, Sample]) -> bool:
    """Whether the greedy response to the sample's prompt has a score."""
    return sample.group in baselines and baselines[sample.group].score is not None


def _token_rewards(sample: Sample) -> Float32[np.ndarray, "T"]:
    outcome, completion = sample.outcome, sample.completion
    assert isinstance(outcome, Score)
    assert completion is not None
    if outcome.token_rewards is not None:
        return outcome.token_rewards
    rewards_T = np.zeros(len(completion.response_ids), dtype=np.float32)
    rewards_T[np.flatnonzero(completion.produced_T)[-1:]] = outcome.value
    return rewards_T


def rollout_metrics(
    samples: Sequence[Sample], max_response_length: int, baselines: Sequence[Sample] = ()
) -> dict[str, float]:
    """Figures of one step's samples, in the field's names; rewards as scored, before any shaping.

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


def token_row(sample: Sample, tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokens of an episode as `samples/step_N.jsonl` has them, under `tokens`; nothing where the sample is one response.

    Args:
        sample: with its completion.
        tokenizer: of the run.

    Returns:
        `text` of each token alone, `mask` (1 where the policy produced it), and the rollout's `log_probs` in nats, None where the mask
        is 0; these only where the engine gave them. Each is a list of T.
    """
    completion = sample.completion
    if sample.trajectory is None or completion is None:
        return {}
    # After another token: some tokenizers drop the space before the first word that they decode.
    before = list(tokenizer("a", add_special_tokens=False)["input_ids"])[-1:]
    start = str(tokenizer.decode(before))
    texts = {
        token: str(tokenizer.decode([*before, token])).removeprefix(start)
        for token in set(completion.response_ids.tolist())
    }
    tokens: dict[str, Any] = {
        "text": [texts[token] for token in completion.response_ids.tolist()],
        "mask": completion.produced_T.astype(int).tolist(),
    }
    log_probs_T = completion.raw_log_probs if completion.log_probs is None else completion.log_probs
    if log_probs_T is not None:
        tokens["log_probs"] = [
            round(value, 4) if produced else None
            for value, produced in zip(log_probs_T.tolist(), tokens["mask"], strict=True)
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
    episodes = [(s.trajectory, s.completion) for s in samples if s.trajectory and s.completion]
    if not episodes:
        return {}
    trajectories = [trajectory for trajectory, _ in episodes]
    turns_N = np.array([len(t.turns) for t in trajectories], np.float64)
    shown_N = np.array([np.count_nonzero(~c.produced_T) for _, c in episodes], np.float64)
    ends = Counter(str(trajectory.end) for trajectory in trajectories)
    counted = sorted({name for t in trajectories for name in t.counts})
    return {
        **{
            f"episode/{name}": float(np.mean([t.counts.get(name, 0.0) for t in trajectories]))
            for name in counted
        },
        "episode/turns/mean": float(turns_N.mean()),
        "episode/turns/max": float(turns_N.max()),
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
