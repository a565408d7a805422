"""Metrics of a step's samples: lengths, rewards, episodes, staleness, and signs of reward hacking.

Legend: N samples, T response tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from dovetail.interfaces import EpisodeEnd, Failure, Sample, Score

NGRAM = 4
"""The length in tokens of an n-gram whose repetition counts as repeated text."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
"""An odd multiplier, 2^64 divided by the golden ratio, that hashes n-grams of tokens to 64 bits with hardly any collision."""
_HASH_BITS = np.uint64(44)
"""Number of bits of an n-gram's hash that are compared. They are the low bits of a 64-bit key; the high bits are the response's index."""


def rollout_metrics(
    samples: Sequence[Sample], max_response_length: int, baselines: Sequence[Sample] = ()
) -> dict[str, float]:
    """Return metrics of one step's samples: lengths, rewards and episodes; rewards are as scored, before any shaping.

    Args:
        samples: all generated samples, trained on or not; at least one. Lengths count tokens that the policy produced.
        max_response_length: the longest response allowed, in tokens.
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


def staleness_metrics(samples: Sequence[Sample], weight_version: int) -> dict[str, float]:
    """Return metrics of the tokens' staleness: the age of the weights that produced a token, in versions of the rollout's weights.

    `rollout/staleness_mean`, `_p95` and `_max` are over the tokens that the policy produced. `rollout/staleness_share_K` is the share
    of these tokens that is K versions old, for each K that occurs. `rollout/partial_share` is the share of responses that were
    generated under several versions. Empty without tokens.

    Args:
        samples: the samples of a step.
        weight_version: the version of the rollout's weights when the step took the samples.
    """
    versions = [
        np.concatenate([c.weight_versions[c.produced_T] for c in s.sequences])
        for s in samples
        if s.response_length
    ]
    if not versions:
        return {}
    age_T = weight_version - np.concatenate(versions)
    ages, counts = np.unique(age_T, return_counts=True)
    shares = (counts / len(age_T)).tolist()
    return {
        "rollout/staleness_mean": float(age_T.mean()),
        "rollout/staleness_p95": float(np.percentile(age_T, 95, method="higher")),
        "rollout/staleness_max": float(age_T.max()),
        "rollout/partial_share": float(np.mean([v[0] != v[-1] for v in versions])),
        **{
            f"rollout/staleness_share_{age}": share
            for age, share in zip(ages.tolist(), shares, strict=True)
        },
    }


def reward_signals(samples: Sequence[Sample]) -> dict[str, float]:
    """Return metrics of one step's samples that may show reward hacking.

    Args:
        samples: all generated samples; failed samples count in metrics that need no score.

    Returns:
        `reward/length_correlation`: Pearson correlation of score and response length (tokens), each minus its group's
        mean, so that long answers to hard prompts do not count; absent if either does not vary.
        `reward/repeated_text`: mean share of a response's 4-grams that occurred earlier in the response.
        `reward/identical_responses`: share of responses whose text equals an earlier response of the same group.
    """
    if not samples:
        return {}
    responses = [s.response_ids[s.produced_T] for s in samples if s.completion]
    different = {(sample.group, sample.text) for sample in samples}
    metrics = {
        "reward/repeated_text": float(repeated_shares(responses).mean()),
        "reward/identical_responses": 1.0 - len(different) / len(samples),
    }
    correlation = _length_correlation(samples)
    return metrics if correlation is None else metrics | {"reward/length_correlation": correlation}


def repeated_shares(responses: Sequence[Int[np.ndarray, "T"]]) -> Float[np.ndarray, "N"]:
    """Return the share of each response's 4-grams that occurred earlier in it; 0 for a response too short for two 4-grams.

    Args:
        responses: N responses, N > 0, int64 [T] each.
    """
    ids = np.concatenate(responses).astype(np.uint64)
    lengths = [len(ids_T) for ids_T in responses]
    of_token = np.repeat(np.arange(len(responses), dtype=np.uint64), lengths)
    count = max(len(ids) - NGRAM + 1, 0)
    runs = np.zeros(count, np.uint64)
    for offset in range(NGRAM):
        runs = (runs + ids[offset : offset + count] + np.uint64(1)) * _MIX
        runs ^= runs >> np.uint64(29)
    within = of_token[:count] == of_token[NGRAM - 1 :]
    # Keys of 64 bits are sorted several times as fast as pairs of a response and an n-gram.
    keys = np.sort((of_token[:count] << _HASH_BITS | runs >> (np.uint64(64) - _HASH_BITS))[within])
    number_of_key = (keys >> _HASH_BITS).astype(np.int64)
    total_N = np.bincount(number_of_key, minlength=len(responses))
    again = number_of_key[1:][keys[1:] == keys[:-1]]
    distinct_N = total_N - np.bincount(again, minlength=len(responses))
    return np.where(total_N > 0, 1.0 - distinct_N / np.maximum(total_N, 1), 0.0)


def distribution(name: str, values_N: Float[np.ndarray, "N"]) -> dict[str, float]:
    """Return the spread of a reward component's values: `reward/component_std/<name>`, and the 10th and 90th percentile as
    `reward/component_p10/<name>` and `reward/component_p90/<name>`.
    """
    low, high = np.percentile(values_N, (10, 90))
    return {
        f"reward/component_std/{name}": float(np.std(values_N)),
        f"reward/component_p10/{name}": float(low),
        f"reward/component_p90/{name}": float(high),
    }


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
    """Return whether the reward component `<scorer>/<part>` always equals the component `<scorer>` of the same last name.

    Its metrics would then only repeat those of `<scorer>`. For example, `format/format` repeats `format` if the two are equal in every
    sample that has `format/format`.
    """
    scorer, _, part = name.rpartition("/")
    if not scorer or scorer.rpartition("/")[2] != part:
        return False
    return all(
        score.components[name] == score.components.get(scorer)
        for score in scores
        if name in score.components
    )


def _episode_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return metrics `episode/…`; empty without episodes.

    Means and maxima count turns, sequences, tool calls, tokens that the policy did not produce, seconds, and the agent loop's own
    `counts`; `episode/end/<end>` is the share of episodes that ended in this way.
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


def _length_correlation(samples: Sequence[Sample]) -> float | None:
    scored = [(s.group, s.score, s.response_length) for s in samples if s.score is not None]
    if not scored:
        return None
    groups, scores, lengths = (np.array(column, np.float64) for column in zip(*scored, strict=True))
    _, index_N = np.unique(groups, return_inverse=True)
    scores_N, lengths_N = _centred(scores, index_N), _centred(lengths, index_N)
    scale = float(np.sqrt((scores_N**2).sum() * (lengths_N**2).sum()))
    # Below 1e-9 the deviations are rounding errors of equal values.
    return float((scores_N * lengths_N).sum() / scale) if scale > 1e-9 else None


def _centred(values_N: Float[np.ndarray, "N"], index_N: Int[np.ndarray, "N"]) -> np.ndarray:
    """Return each value minus the mean of its group; `index_N` has the index of each value's group."""
    means = np.bincount(index_N, weights=values_N) / np.bincount(index_N)
    return values_N - means[index_N]
