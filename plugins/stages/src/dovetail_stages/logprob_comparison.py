"""Two policies' log-probabilities of the same tokens, side by side. K tokens, masked in and finite."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np

from dovetail.sections import RolloutSection


@attrs.frozen(kw_only=True, eq=False)
class Comparison:
    """The log-probabilities of K tokens by the trainer and by the rollout engine, float64 in nats, and their statistics."""

    train_K: np.ndarray
    rollout_K: np.ndarray
    raw_K: np.ndarray | None
    """The rollout engine's log-probabilities of the full softmax; None if the engine gave none or any is not finite."""
    version_K: np.ndarray | None
    """Version of the weights that produced each token; None if the batch has no versions."""
    row_K: np.ndarray
    """Row of each token's sample; ascending."""
    stale_K: np.ndarray
    """bool; True for tokens of another weight version than the trainer's. All False if either version is unknown."""
    beyond_K: np.ndarray
    """log p_rollout − log p_train, minus the part that top-p or top-k can explain."""
    gap_K: np.ndarray
    """|p_train − p_rollout|."""
    unexplained_K: np.ndarray
    """|p_train − p_rollout| after top-p or top-k is allowed for: p_train is first raised by as much as they can explain."""
    raw_gap_K: np.ndarray | None
    """|p_train − p_raw|, where log p_raw is `raw_K`; None if `raw_K` is."""
    temperature_N: np.ndarray | None
    """The temperature by which the trainer divided each sample's logits; None if the batch has no column `temperature`."""
    truncated: bool
    """Whether the rollout's top-p or top-k may have excluded tokens, or it sampled greedily (temperature 0)."""

    @classmethod
    def of(
        cls,
        *,
        train_K: np.ndarray,
        rollout_K: np.ndarray,
        raw_K: np.ndarray | None,
        version_K: np.ndarray | None,
        row_K: np.ndarray,
        temperature_N: np.ndarray | None,
        weight_version: int | None,
        sampling: RolloutSection,
    ) -> Comparison:
        """Compute the differences between rollout and trainer, with an allowance for top-p and top-k."""
        if raw_K is not None and not np.isfinite(raw_K).all():
            raw_K = None
        most = most_truncation(sampling)
        difference_K = rollout_K - train_K
        allowed_K = np.clip(difference_K, 0.0, most)
        return cls(
            train_K=train_K,
            rollout_K=rollout_K,
            raw_K=raw_K,
            version_K=version_K,
            row_K=row_K,
            stale_K=np.not_equal(version_K, weight_version)
            if version_K is not None and weight_version is not None
            else np.zeros(len(train_K), np.bool_),
            beyond_K=difference_K - allowed_K,
            gap_K=_gap(rollout_K, train_K),
            unexplained_K=_gap(rollout_K, train_K + allowed_K),
            raw_gap_K=None if raw_K is None else _gap(raw_K, train_K),
            temperature_N=temperature_N,
            truncated=most > 0,
        )

    @staticmethod
    def mean(values_K: np.ndarray) -> float:
        """Return the mean of K values; 0 if K is 0."""
        return float(values_K.mean()) if len(values_K) else 0.0

    @property
    def judged_K(self) -> np.ndarray:
        """The probability difference by which each token is judged, float64 [K]: `unexplained_K`, or `raw_gap_K` where it is larger.

        `raw_gap_K` is used only if sampling is truncated and the engine gave `raw_K`.
        """
        if self.truncated and self.raw_gap_K is not None:
            # The allowance for truncation hides half of an error, but raw log-probabilities show all of it.
            return np.maximum(self.unexplained_K, self.raw_gap_K)
        return self.unexplained_K

    @property
    def judged(self) -> float:
        """The mean of `judged_K`, which the check compares with the bounds of its config."""
        return self.mean(self.judged_K)

    @property
    def correlation(self) -> float:
        """Pearson correlation of the trainer's and the rollout's probabilities; NaN if either does not vary."""
        one_K, other_K = np.exp(self.train_K), np.exp(self.rollout_K)
        if len(one_K) < 2 or not one_K.std() or not other_K.std():
            return math.nan
        return float(np.corrcoef(one_K, other_K)[0, 1])

    def worst_rows(self) -> np.ndarray:
        """Return the rows of the samples that differ between rollout and trainer, int64 [M], the worst sample first.

        Samples are ordered by the mean, over their tokens, of `judged_K`, increased by 1 at each stale token.
        """
        if not len(self.row_K):
            return np.empty(0, np.int64)
        badness_K = self.judged_K + self.stale_K
        rows, index_K = np.unique(self.row_K, return_inverse=True)
        means = np.bincount(index_K, weights=badness_K) / np.bincount(index_K)
        order = np.argsort(-means, kind="stable")
        return rows[order[means[order] > 0]]

    def only(self, chosen_K: np.ndarray) -> Comparison:
        """Return the comparison restricted to the chosen tokens, a bool mask [K]."""
        parts: dict[str, Any] = {
            field.name: value[chosen_K]
            for field in attrs.fields(Comparison)
            if field.name.endswith("_K") and (value := getattr(self, field.name)) is not None
        }
        return attrs.evolve(self, **parts)


def most_truncation(sampling: RolloutSection) -> float:
    """Return the most, in nats, by which the sampler's truncation can raise a sampled token's log-probability."""
    if sampling.top_k > 0 or not sampling.temperature:
        return math.inf
    return -math.log(sampling.top_p) if sampling.top_p < 1 else 0.0


def _gap(one_K: np.ndarray, other_K: np.ndarray) -> np.ndarray:
    return np.abs(np.exp(one_K) - np.exp(other_K))
