"""The cause of a difference between rollout and training log-probabilities: weight version, sampling transform, or numerics.

If the difference is confined to tokens of another weight version, the cause is the weights. The cause is the sampling transform if, for
example, log-probabilities before sampling agree and those after sampling differ; if nearly all differences have the same sign; or if the
differences depend on the log-probability as they would if the temperatures differed. Otherwise the cause is numerics.

Legend: K compared tokens, all masked in and with finite log-probabilities.
"""

from __future__ import annotations

from typing import Literal

import attrs
import numpy as np

from dovetail.sections import RolloutSection
from dovetail_stages.logprob_comparison import Comparison

Cause = Literal["weights_version", "sampling_transform", "numerics"]

NOTICEABLE = 1e-3
"""Smallest difference of a token's log-probabilities that is not rounding, in nats."""
ENOUGH = 100
"""Minimum number of tokens from which a pattern in the differences is taken as evidence of a cause."""
ONE_SIGN = 0.99
"""If the rollout's log-probability is the higher one in at least this share of the noticeable differences, the sampler is taken to have
left out tokens."""
EXPLAINED = 0.35
"""Minimum share of the variation in the differences that a different temperature must explain to be named as the cause."""
ALIKE = 0.9
"""A different temperature is considered as the cause only if rollout and trainer probabilities correlate at least this much."""


@attrs.frozen
class Diagnosis:
    """The cause of a difference between rollout and trainer, the evidence for it, and the fix."""

    cause: Cause
    text: str
    hint: str


def diagnose(
    found: Comparison,
    sampling: RolloutSection,
    bound: float,
    weight_version: int | None,
    broken: int,
) -> Diagnosis:
    """Return the cause of the difference between the log-probabilities of rollout and trainer.

    Args:
        found: the comparison of the log-probabilities.
        sampling: the sampling settings of the rollout.
        bound: largest mean difference that needs no explanation.
        weight_version: the current version of the weights, if known.
        broken: number of masked-in tokens whose log-probabilities are not finite.
    """
    if broken:
        return Diagnosis(
            "numerics",
            f"{broken:,} log-probabilities are NaN or infinite",
            "compute these samples in float32; an engine that returns −inf sampled a token that it gives probability 0",
        )
    fresh = found.only(~found.stale_K)
    if found.stale_K.any() and fresh.judged <= bound:
        return _stale(found, weight_version)
    finding = _sampling(fresh, sampling, bound) or _numerics(fresh)
    if not found.stale_K.any():
        return finding
    also = f"{finding.text}; besides, {_stale(found, weight_version).text}"
    return attrs.evolve(finding, text=also)


def _stale(found: Comparison, weight_version: int | None) -> Diagnosis:
    assert found.version_K is not None
    versions, counts = np.unique(found.version_K[found.stale_K], return_counts=True)
    which = ", ".join(
        f"{v} ({c:,} tokens)" for v, c in zip(versions.tolist(), counts.tolist(), strict=True)
    )
    samples = len(np.unique(found.row_K[found.stale_K]))
    return Diagnosis(
        "weights_version",
        f"{counts.sum():,} of {len(found.stale_K):,} tokens, in {samples:,} samples, were produced by weights of version "
        f"{which}, while version {weight_version} is the current one",
        "check that every replica receives each weight update and resets its prefix cache, and that requests are drained "
        "before the update; if old weights are intended, set algorithm.rollout_correction",
    )


def _sampling(found: Comparison, sampling: RolloutSection, bound: float) -> Diagnosis | None:
    """Return the diagnosis that the sampler's transform, such as truncation, causes the difference; None if nothing points to it."""
    if found.judged <= bound:
        return Diagnosis(
            "sampling_transform",
            f"top_p = {sampling.top_p:g} and top_k = {sampling.top_k} leave tokens out, and so raise the log-probabilities of "
            "the others; nothing else differs",
            "this biases ratios to rollout_log_probs: to avoid it, train with top_p = 1 and top_k = -1",
        )
    return (
        _other_temperature_column(found, sampling)
        or _raw_agree(found, bound)
        or _last_tokens(found, bound)
        or _one_sign(found, sampling, bound)
        or _other_temperature(found)
    )


def _other_temperature_column(found: Comparison, sampling: RolloutSection) -> Diagnosis | None:
    if found.temperature_N is None or not sampling.temperature:
        return None
    used = np.unique(found.temperature_N[np.unique(found.row_K)])
    if np.allclose(used, sampling.temperature, rtol=1e-3, atol=0):
        return None
    return Diagnosis(
        "sampling_transform",
        f"the rollout sampled at temperature {sampling.temperature:g}, but the trainer divides logits by "
        + ", ".join(f"{value:g}" for value in used.tolist()),
        "set the batch's column `temperature` to the temperature that the rollout sampled with",
    )


def _raw_agree(found: Comparison, bound: float) -> Diagnosis | None:
    if found.raw_gap_K is None or found.mean(found.raw_gap_K) > bound:
        return None
    return Diagnosis(
        "sampling_transform",
        f"the engine's log-probabilities before sampling agree with the trainer's (mean difference "
        f"{found.mean(found.raw_gap_K):.4f}), but those of the sampler don't",
        "look for a temperature, top-p, top-k, min-p, penalty or logit bias that the engine applies and the config "
        "does not name, such as the model's own generation_config.json",
    )


def _last_tokens(found: Comparison, bound: float) -> Diagnosis | None:
    last_K = np.diff(found.row_K, append=-1) != 0
    inner, last = found.only(~last_K), found.only(last_K)
    if len(inner.row_K) < len(last.row_K) or inner.judged > min(bound, last.judged / 5):
        return None
    return Diagnosis(
        "sampling_transform",
        f"only the last tokens of the {len(last.row_K):,} samples differ (mean {last.judged:.4f}; other tokens {inner.judged:.4f})",
        "check what the engine returns for the token that ends a response, and whether `stop`, `stop_token_ids` or "
        "`ignore_eos` change its logits",
    )


def _one_sign(found: Comparison, sampling: RolloutSection, bound: float) -> Diagnosis | None:
    if found.raw_gap_K is not None and found.mean(found.raw_gap_K) > bound:
        # The log-probabilities before any transform differ too, so truncation is not the cause.
        return None
    beyond = found.beyond_K[np.abs(found.beyond_K) > NOTICEABLE]
    if len(beyond) < ENOUGH or np.mean(beyond > 0) < ONE_SIGN:
        return None
    return Diagnosis(
        "sampling_transform",
        f"{np.mean(beyond > 0):.1%} of the differing log-probabilities are higher in the rollout than in the trainer, as if the "
        f"sampler left out more tokens than top_p = {sampling.top_p:g} and top_k = {sampling.top_k} do",
        "check that the engine takes top-p, top-k and min-p from the config, not from the model's generation_config.json",
    )


def _other_temperature(found: Comparison) -> Diagnosis | None:
    """Return the diagnosis that the temperatures differ, if the differences depend on the log-probability in that way; else None.

    With β = 1 / temperature and the entropy H, d log p / d log β = log p + H. If a token competes with one other token, the
    derivative is (1 − p)(log p − log(1 − p)). The differences are fitted by a multiple of this term plus a multiple of log p, which
    stands for tokens that compete with more than one other token.
    """
    # Raw log-probabilities if sampling is truncated, since truncation causes differences that follow the log-probability too.
    other_K = found.raw_K if found.truncated else found.rollout_K
    if other_K is None or len(other_K) < ENOUGH or found.correlation < ALIKE:
        return None
    difference_K = other_K - found.train_K
    middle_K = np.minimum((found.train_K + other_K) / 2, -1e-9)
    p_K = np.exp(middle_K)
    two_tokens_K = (1 - p_K) * (middle_K - np.log1p(-p_K))
    features_K2 = np.stack([two_tokens_K, middle_K], axis=1)
    slope_2, *_ = np.linalg.lstsq(features_K2, difference_K)
    residual_K = difference_K - features_K2 @ slope_2
    total = np.square(difference_K).sum()
    explained = 1 - np.square(residual_K).sum() / total if total else 0.0
    if explained < EXPLAINED:
        return None
    return Diagnosis(
        "sampling_transform",
        f"the differences depend on the log-probability as if the temperatures differed: the rollout's distribution is "
        f"{'sharper' if slope_2[0] > 0 else 'flatter'} than the trainer's (this explains {explained:.0%} of the variation)",
        "check that the engine divides logits by rollout.temperature before it computes log-probabilities, and applies no "
        "penalty",
    )


def _numerics(found: Comparison) -> Diagnosis:
    far = found.judged > 0.05 or found.correlation < 0.95
    return Diagnosis(
        "numerics",
        "neither the recorded weight versions nor the sampling settings explain the difference"
        + (
            "; precision alone seldom causes a difference as large as this"
            if far
            else "; precision and kernels normally cause less than 0.005, and more than 0.01 means that one of them is wrong"
        ),
        (
            "check that the engine loaded the weights as they were sent, and that rollout and trainer use the same tokens, positions and adapters; then "
            if far
            else ""
        )
        + "compare dtypes (model.dtype, the engine's own, its KV cache, quantisation) and attention kernels; a rollout "
        "correction such as decoupled_token_is corrects what remains",
    )
