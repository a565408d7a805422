"""Signs of a hacked reward: what a policy does that has found out how to please the scorer and not the user.

Legend: N samples, T response tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from dovetail.interfaces import Sample

NGRAM = 4
"""Tokens of a run whose repetition counts as repeated text."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
"""An odd constant with even bits: runs of tokens become 64-bit numbers that hardly ever coincide."""


def reward_signals(samples: Sequence[Sample]) -> dict[str, float]:
    """Return figures of one step's samples.

    Args:
        samples: all that were generated; failed ones count where no score is needed.

    Returns:
        `reward/length_correlation`: Pearson's correlation of score and response length (tokens), both less their group's
        mean, so that long answers to hard prompts do not count; absent where either does not vary.
        `reward/repeated_text`: mean share of a response's runs of 4 tokens that stood in it before.
        `reward/identical_responses`: share of responses that equal, as text, an earlier one of their group.
    """
    if not samples:
        return {}
    responses = [s.response_ids[s.produced_T] for s in samples if s.completion]
    metrics = {
        "reward/repeated_text": float(repeated_shares(responses).mean()),
        "reward/identical_responses": _identical(samples),
    }
    correlation = _length_correlation(samples)
    return metrics if correlation is None else metrics | {"reward/length_correlation": correlation}


def repeated_shares(responses: Sequence[Int[np.ndarray, "T"]]) -> Float[np.ndarray, "N"]:
    """Return the share of each response's runs of 4 tokens that stood in it before; 0 where it is too short for two.

    Args:
        responses: N of them, N > 0, int64 [T] each.
    """
    ids = np.concatenate(responses).astype(np.uint64)
    of_token = np.repeat(np.arange(len(responses)), [len(ids_T) for ids_T in responses])
    count = max(len(ids) - NGRAM + 1, 0)
    runs = np.zeros(count, np.uint64)
    for offset in range(NGRAM):
        runs = (runs + ids[offset : offset + count] + np.uint64(1)) * _MIX
        runs ^= runs >> np.uint64(29)
    within = of_token[:count] == of_token[NGRAM - 1 :]
    numbers, runs = of_token[:count][within], runs[within]
    order = np.lexsort((runs, numbers))
    numbers, runs = numbers[order], runs[order]
    again = (numbers[1:] == numbers[:-1]) & (runs[1:] == runs[:-1])
    total_N = np.bincount(numbers, minlength=len(responses))
    distinct_N = total_N - np.bincount(numbers[1:][again], minlength=len(responses))
    return np.where(total_N > 0, 1.0 - distinct_N / np.maximum(total_N, 1), 0.0)


def distribution(name: str, values_N: Float[np.ndarray, "N"]) -> dict[str, float]:
    """Return how a part of the reward is spread: `reward/component_std/<name>`, and the 10th and 90th percentile as
    `reward/component_p10/<name>` and `reward/component_p90/<name>`; at least one value.
    """
    low, high = np.percentile(values_N, (10, 90))
    return {
        f"reward/component_std/{name}": float(np.std(values_N)),
        f"reward/component_p10/{name}": float(low),
        f"reward/component_p90/{name}": float(high),
    }


def _identical(samples: Sequence[Sample]) -> float:
    different = Counter((sample.group, sample.text) for sample in samples)
    return 1.0 - len(different) / len(samples)


def _length_correlation(samples: Sequence[Sample]) -> float | None:
    scored = [(s.group, s.score, s.response_length) for s in samples if s.score is not None]
    if not scored:
        return None
    groups, scores, lengths = (np.array(column, np.float64) for column in zip(*scored, strict=True))
    _, index_N = np.unique(groups, return_inverse=True)
    scores_N, lengths_N = _centred(scores, index_N), _centred(lengths, index_N)
    scale = float(np.sqrt((scores_N**2).sum() * (lengths_N**2).sum()))
    # what rounding leaves of equal scores is no variation
    return float((scores_N * lengths_N).sum() / scale) if scale > 1e-9 else None


def _centred(values_N: Float[np.ndarray, "N"], index_N: Int[np.ndarray, "N"]) -> np.ndarray:
    """The values less the mean of their group."""
    means = np.bincount(index_N, weights=values_N) / np.bincount(index_N)
    return values_N - means[index_N]
