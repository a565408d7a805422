"""Base classes of the estimators with a baseline from the group. N samples, G groups."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float64, Real

from dovetail.batch import Batch
from dovetail.interfaces import AdvantageEstimator, Advantages, Groups, PluginConfig

EPSILON = 1e-6
"""Constant added to a group's standard deviation, in the reward's unit."""


class GroupBaseline(AdvantageEstimator):
    """A sample-level estimator that compares a sample's reward with the rewards of its group.

    A sample alone in its group has advantage 0, and a metric counts such groups. A trajectory of several sequences counts once.
    """

    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    scope: ClassVar[Literal["sample", "group", "batch"]] = "group"
    level = "sample"

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"scores"})

    @classmethod
    def provides(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"advantages"})

    @classmethod
    def min_group_size(cls, config: PluginConfig) -> int:
        return 2

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        columns.require(sorted(self.requires(self.config)), f"advantage estimator {self.name!r}")
        advantages_N = self.compare(columns, groups)
        return Advantages(
            advantages=advantages_N.astype(np.float32),
            metrics=group_metrics(advantages_N, groups),
        )

    @abstractmethod
    def compare(self, columns: Batch, groups: Groups) -> Float64[np.ndarray, "N"]:
        """Return advantages, float64 [N], from the columns that `requires` names."""


class ScoreBaseline(GroupBaseline):
    """A group baseline that needs only the scores."""

    def compare(self, columns: Batch, groups: Groups) -> Float64[np.ndarray, "N"]:
        return self.relative(np.asarray(columns["scores"], np.float64), groups)

    @abstractmethod
    def relative(
        self, scores_N: Float64[np.ndarray, "N"], groups: Groups
    ) -> Float64[np.ndarray, "N"]:
        """Return advantages, float64 [N], from rewards, float64 [N]."""


def deviations(scores_N: Float64[np.ndarray, "N"], groups: Groups) -> Float64[np.ndarray, "N"]:
    """Return each reward minus its group's mean, float64 [N]; exactly 0 in groups that `comparable_G` excludes.

    The computed mean of equal rewards has a rounding error, which a division by their standard deviation would magnify.
    """
    return np.where(
        comparable_G(scores_N, groups)[groups.index_N],
        scores_N - groups.mean_N(scores_N),
        scores_N - scores_N,  # 0; NaN for a score that is not finite
    )


def comparable_G(scores_N: Float64[np.ndarray, "N"], groups: Groups) -> Bool[np.ndarray, "G"]:
    """Return a mask, bool [G], of groups whose samples get advantages: those with two or more trajectories and unequal rewards."""
    smallest_G = np.full(groups.count, np.inf)
    largest_G = np.full(groups.count, -np.inf)
    np.minimum.at(smallest_G, groups.index_N, scores_N)
    np.maximum.at(largest_G, groups.index_N, scores_N)
    return (smallest_G != largest_G) & (groups.sizes_G > 1)


def deviation_spread_N(
    deviations_N: Float64[np.ndarray, "N"], groups: Groups
) -> Float64[np.ndarray, "N"]:
    """Return the unbiased standard deviation of the rewards in each sample's group, float64 [N], from the result of `deviations`."""
    variance_G = groups.sum_G(np.square(deviations_N)) / np.maximum(groups.sizes_G - 1, 1)
    return np.sqrt(variance_G)[groups.index_N]


def relative_to_group(
    scores_N: Float64[np.ndarray, "N"], groups: Groups, *, by_std: bool
) -> Float64[np.ndarray, "N"]:
    """Return `deviations`, float64 [N]; with `by_std` divided by (std_g + 1e-6), std_g the unbiased standard deviation."""
    deviations_N = deviations(scores_N, groups)
    if not by_std:
        return deviations_N
    return deviations_N / (deviation_spread_N(deviations_N, groups) + EPSILON)


def group_metrics(advantages_N: Real[np.ndarray, "N"], groups: Groups) -> dict[str, float]:
    """Return the number of groups with a single trajectory, and the share of all groups that have no gradient."""
    sizes_G = groups.sizes_G
    present_G = sizes_G > 0
    signal_G = groups.sum_G(np.abs(advantages_N)) != 0
    return {
        "advantage/singleton_groups": float(np.count_nonzero(sizes_G == 1)),
        "advantage/zero_signal_groups": float(np.mean(~signal_G[present_G]))
        if present_G.any()
        else 0.0,
    }
