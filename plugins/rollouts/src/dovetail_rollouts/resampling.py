"""Estimates of pass@k and similar metrics, and bootstrap intervals of means over prompts. Legend: P prompts, M samples a prompt.

A prompt's samples are left-aligned in a row of width M, and `sizes_P` has their number. Drawing k of m samples is always
without replacement; if a prompt has fewer than k samples, all are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64, Real

DRAWS = 1 << 16
"""Number of random draws of a majority estimate, divided among the prompts, for a standard error below 0.002 of the scores' range."""
MOST_DRAWS = 1024
"""Largest number of draws of a single prompt."""
_CELLS = 1 << 22
"""Maximum number of entries of a temporary array."""


def powers_up_to(n: int) -> list[int]:
    """Return the sizes k of pass@k and similar metrics: 1, 2, 4, … up to n, and n itself."""
    if n < 1:
        raise ValueError(f"n must be 1 or more, but is {n}")
    return [*(1 << i for i in range((n - 1).bit_length())), n]


def pass_at_k(
    passed_P: Int64[np.ndarray, "P"], sizes_P: Int64[np.ndarray, "P"], k: int
) -> Float64[np.ndarray, "P"]:
    """Estimate pass@k without bias, float64 [P]: the probability that at least one of k samples passes (arXiv 2107.03374, eq. 1).

    If c of m samples pass, the estimate is 1 − C(m − c, k) / C(m, k) = 1 − Π_{j<k} (1 − c / (m − j)). The product is computed as
    a sum of logarithms, so no digits are lost in large binomials or in the difference to 1.

    Args:
        passed_P: c, number of each prompt's samples that pass, 0 … m.
        sizes_P: m, number of each prompt's samples, 1 or more.
        k: number of samples drawn, 1 or more; m for a prompt with fewer samples.
    """
    drawn_P = np.minimum(k, sizes_P)
    left_PK = sizes_P[:, None] - np.arange(k)
    share_PK = np.where(
        np.arange(k) < drawn_P[:, None], passed_P[:, None] / np.maximum(left_PK, 1), 0.0
    )
    certain_P = sizes_P - passed_P < drawn_P
    logs_PK = np.log1p(-np.where(certain_P[:, None], 0.0, share_PK))
    return np.where(certain_P, 1.0, -np.expm1(logs_PK.sum(1)))


def best_at_k(
    scores_PM: Float64[np.ndarray, "P M"], sizes_P: Int64[np.ndarray, "P"], k: int
) -> Float64[np.ndarray, "P"]:
    """Return the expected largest score among k samples drawn without replacement, float64 [P].

    With a prompt's m scores in ascending order, s_1 ≤ … ≤ s_m, the result is Σ_i s_i · C(i − 1, k − 1) / C(m, k). For scores of
    0 and 1 this is pass@k.

    Args:
        scores_PM: float64 [P, M]; values beyond a row's size are not read.
        sizes_P: m, number of each prompt's samples, 1 or more.
        k: number of samples drawn, 1 or more; m for a prompt with fewer samples.
    """
    width = scores_PM.shape[1]
    rank_M = np.arange(width)
    there_PM = rank_M < sizes_P[:, None]
    falling_PM = -np.sort(np.where(there_PM, -scores_PM, np.inf), axis=1)
    drawn_P1 = np.minimum(k, sizes_P)[:, None]
    # The chance that the sample at rank r, by descending score, is the best of k: k/m for r = 0, then times (m − r − k) / (m − 1 − r).
    others_PM = np.maximum(sizes_P[:, None] - 1 - rank_M, 1)
    steps_PM = np.maximum(sizes_P[:, None] - drawn_P1 - rank_M, 0) / others_PM
    weights_PM = drawn_P1 / sizes_P[:, None] * np.ones(width)
    weights_PM[:, 1:] *= np.cumprod(steps_PM, axis=1)[:, :-1]
    return (np.where(there_PM, falling_PM, 0.0) * weights_PM).sum(1)


def majority_at_k(
    scores_PM: Float64[np.ndarray, "P M"],
    answers_PM: Int64[np.ndarray, "P M"],
    sizes_P: Int64[np.ndarray, "P"],
    ks: Sequence[int],
    rng: np.random.Generator,
) -> Float64[np.ndarray, "K P"]:
    """Return the expected score of the answer that most of k samples give (arXiv 2203.11171), float64 [K, P].

    The score of an answer is the mean over the prompt's samples that give it. If several answers have the
    most votes, the score of the draw is the mean of their scores. Samples without an answer have no vote; if no drawn
    sample has an answer, the score of the draw is the mean over the prompt's samples without an answer. The result is exact
    for k = 1 (the mean of all samples) and for k ≥ m, the number of the prompt's samples. For other k it is a mean over
    random draws; all k use the same draws.

    Args:
        scores_PM: float64 [P, M]; values beyond a row's size are not read.
        answers_PM: int64 [P, M], index of the answer that each sample gives, 0 … M − 1, equal for equal answers; −1 for no answer.
        sizes_P: m, number of each prompt's samples, 1 or more.
        ks: the K values of k (the number of samples drawn), each 1 or more.
        rng: the random generator.
    """
    prompts, width = scores_PM.shape
    there_PM = np.arange(width) < sizes_P[:, None]
    # Arrays by answer (A) have "no answer" in column 0 and padding in the last column; neither can win a vote.
    codes_PM = np.where(there_PM, answers_PM + 1, width + 1)
    counts_PA = _count(codes_PM, width + 2)
    sums_PA = _count(codes_PM, width + 2, np.where(there_PM, scores_PM, 0.0))
    worth_PA = sums_PA / np.maximum(counts_PA, 1)
    between = [k for k in ks if 1 < k < width]
    drawn_KP = np.zeros((len(between), prompts))
    if between:
        draws = int(np.clip(DRAWS // max(prompts, 1), 16, MOST_DRAWS))
        rows = max(1, _CELLS // (draws * (width + 2)))
        for start in range(0, prompts, rows):
            part = slice(start, start + rows)
            codes_PDM = np.broadcast_to(
                codes_PM[part][:, None, :], (len(codes_PM[part]), draws, width)
            )
            # Sorting by random noise shuffles each row; the padding, with noise 2, sorts last.
            noise_PDM = rng.random(codes_PDM.shape)
            noise_PDM[np.broadcast_to(~there_PM[part][:, None, :], codes_PDM.shape)] = 2.0
            mixed_PDM = np.take_along_axis(codes_PDM, np.argsort(noise_PDM, axis=2), axis=2)
            for i, k in enumerate(between):
                counts_PDA = _count(mixed_PDM[:, :, :k], width + 2)
                drawn_KP[i, part] = _winners_worth(counts_PDA, worth_PA[part]).mean(1)
    mean_P = np.where(there_PM, scores_PM, 0.0).sum(1) / sizes_P
    whole_P = _winners_worth(counts_PA[:, None, :], worth_PA)[:, 0]
    results = []
    for k in ks:
        between_P = drawn_KP[between.index(k)] if k in between else whole_P
        results.append(mean_P if k == 1 else np.where(sizes_P <= k, whole_P, between_P))
    return np.stack(results)


def bootstrap_intervals(
    values_KP: Real[np.ndarray, "K P"],
    rng: np.random.Generator,
    *,
    resamples: int = 1000,
    level: float = 0.95,
) -> tuple[Float64[np.ndarray, "K"], Float64[np.ndarray, "K"]]:
    """Return the lower and upper ends of a percentile bootstrap interval of each row's mean, float64 [K] each (Efron, 1979).

    Each resample draws prompts with replacement, the same prompts for every row. The ends are quantiles of the row's means.

    Args:
        values_KP: K metrics with one value for each of P prompts, P > 0.
        rng: the random generator.
        resamples: the number of resamples of all prompts.
        level: share of the means between the two ends.
    """
    rows, prompts = values_KP.shape
    means_KR = np.empty((rows, resamples))
    # Subtracting the row's mean preserves precision, and gives equal values an interval of width 0.
    centre_K1 = values_KP.mean(1, keepdims=True)
    centred_PK = np.ascontiguousarray((values_KP - centre_K1).T, dtype=np.float64)
    size = max(1, _CELLS // prompts)
    for start in range(0, resamples, size):
        count = min(size, resamples - start)
        drawn = rng.integers(0, prompts, (count, prompts)) + np.arange(count)[:, None] * prompts
        weights_RP = np.bincount(drawn.ravel(), minlength=count * prompts).reshape(count, prompts)
        means_KR[:, start : start + count] = (weights_RP.astype(np.float64) @ centred_PK).T
    tail = (1 - level) / 2
    low_K, high_K = np.quantile(means_KR / prompts, [tail, 1 - tail], axis=1) + centre_K1[:, 0]
    return low_K, high_K


def _count(
    codes: np.ndarray, width: int, weights: np.ndarray | None = None
) -> Float64[np.ndarray, "..."]:
    """Return how often each code 0 … width − 1 occurs in each row (the last axis), or the sum of its weights there, [..., width]."""
    rows = math.prod(codes.shape[:-1])
    flat = codes.reshape(rows, -1) + np.arange(rows)[:, None] * width
    counts = np.bincount(
        flat.ravel(), None if weights is None else weights.ravel(), minlength=rows * width
    )
    return counts.reshape(*codes.shape[:-1], width).astype(np.float64)


def _winners_worth(
    votes_PDA: Float64[np.ndarray, "P D A"], worth_PA: Float64[np.ndarray, "P A"]
) -> Float64[np.ndarray, "P D"]:
    """Return the score of each draw: the mean worth of the answers with the most votes, or the worth of "no answer" without any vote.

    Args:
        votes_PDA: the votes in each of D draws for each answer. Column 0 stands for "no answer", and the last column for padding.
        worth_PA: the mean score of the prompt's samples that give each answer, in the same columns.
    """
    votes_PDA = votes_PDA[:, :, 1:-1]
    most_PD1 = votes_PDA.max(axis=2, keepdims=True)
    won_PDA = (votes_PDA == most_PD1) & (most_PD1 > 0)
    winners_PD = won_PDA.sum(axis=2)
    worth_PD = np.einsum("pda,pa->pd", won_PDA, worth_PA[:, 1:-1]) / np.maximum(winners_PD, 1)
    return np.where(winners_PD > 0, worth_PD, worth_PA[:, :1])
