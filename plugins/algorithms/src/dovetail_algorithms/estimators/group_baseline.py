"""What the estimators with a baseline from the group share. N samples, G groups."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64

from dovetail.batch import Batch
from dovetail.interfaces.advantage import AdvantageEstimator, Advantages, Groups


class GroupBaseline(AdvantageEstimator):
    """A sample-level estimator that compares a sample's reward with those of its group.

    A group of one has nothing to compare with: its advantage is 0, and it is counted.
    """

    api: ClassVar[str] = ">=1.0,<2"
    capabilities: ClassVar[frozenset[str]] = frozenset({"deterministic"})
    scope = "group"
    level = "sample"

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"scores"})

    @classmethod
    def provides(cls, config: Any) -> frozenset[str]:
        return frozenset({"advantages"})

    @classmethod
    def min_group_size(cls, config: Any) -> int:
        return 2

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        columns.require(["scores"], f"advantage estimator {self.name!r}")
        scores_N = np.asarray(columns["scores"], np.float64)
        advantages_N = self.relative(scores_N, groups)
        return Advantages(
            advantages=advantages_N.astype(np.float32),
            metrics=group_metrics(advantages_N, groups),
        )

    @abstractmethod
    def relative(
        self, scores_N: Float64[np.ndarray, "N"], groups: Groups
    ) -> Float64[np.ndarray, "N"]:
        """Advantages from rewards: float64 [N] to float64 [N]."""


def deviations(scores_N: Float64[np.ndarray, "N"], groups: Groups) -> Float64[np.ndarray, "N"]:
    """float64 [N]: reward minus the group's mean; exactly 0 where all rewards of the group are equal.

    The mean of equal numbers is off by a rounding error, which a division by a spread of 0 would blow up.
    """
    smallest_G = np.full(groups.count, np.inf)
    largest_G = np.full(groups.count, -np.inf)
    np.minimum.at(smallest_G, groups.index_N, scores_N)
    np.maximum.at(largest_G, groups.index_N, scores_N)
    equal_N = (smallest_G == largest_G)[groups.index_N]
    return np.where(equal_N, 0.0, scores_N - groups.mean_N(scores_N))


def group_metrics(advantages_N: Float64[np.ndarray, "N"], groups: Groups) -> dict[str, float]:
    """How many groups have one sample only, and which share of all groups teaches nothing."""
    present_G = groups.sizes_G > 0
    signal_G = groups.sum_G(np.abs(advantages_N)) > 0
    return {
        "advantage/singleton_groups": float(np.count_nonzero(groups.sizes_G == 1)),
        "advantage/zero_signal_groups": float(np.mean(~signal_G[present_G]))
        if present_G.any()
        else 0.0,
    }
