"""AdvantageEstimator: rewards to advantages and returns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs
import numpy as np

from dovetail.interfaces.plugin import ColumnPlugin, PluginConfig

if TYPE_CHECKING:
    from jaxtyping import Float32, Float64, Int64, Real, Shaped

    from dovetail.batch.batch import Batch
    from dovetail.batch.ragged import Ragged


@attrs.frozen(eq=False)
class Groups:
    """The assignment of samples to groups, one for each prompt, and to trajectories within a group.

    An agent's episode may consist of several samples, one for each training sequence, which form a trajectory. Sizes, sums and
    means count a trajectory once: each of its samples has the weight 1 / (samples of the trajectory).

    Attributes:
        index_N: the index of each sample's group, int64 [N], 0 … count − 1.
        count: the number of groups.
        trajectory_N: the index of each sample's trajectory, int64 [N], counted from 0 over all groups together; None if
            every sample is a trajectory of its own.
    """

    index_N: Int64[np.ndarray, "N"]
    count: int
    trajectory_N: Int64[np.ndarray, "N"] | None = None

    @classmethod
    def of(
        cls, ids_N: Shaped[np.ndarray, "N"], trajectory_ids_N: Shaped[np.ndarray, "N"] | None = None
    ) -> Groups:
        """Return the groups of samples with arbitrary ids; groups and trajectories are numbered from 0 in order of first appearance.

        Args:
            ids_N: the group id of each sample, [N], of any sortable dtype.
            trajectory_ids_N: the trajectory id of each sample, [N], unique at least within a group.
        """
        index_N, count = _numbered(ids_N)
        if trajectory_ids_N is None:
            return cls(index_N, count)
        trajectory_N, trajectories = _numbered(trajectory_ids_N)
        # Ids need only be unique within a group, so a trajectory is identified by its group and id together.
        trajectory_N, trajectories = _numbered(index_N * trajectories + trajectory_N)
        return cls(index_N, count, trajectory_N if trajectories < len(index_N) else None)

    @property
    def sizes_G(self) -> Int64[np.ndarray, "G"]:
        """int64 [G]: number of trajectories in each group."""
        weights_N = self.weights_N
        if weights_N is None:
            return np.bincount(self.index_N, minlength=self.count)
        sizes_G = np.bincount(self.index_N, weights=weights_N, minlength=self.count)
        return np.rint(sizes_G).astype(np.int64)

    @property
    def weights_N(self) -> Float64[np.ndarray, "N"] | None:
        """float64 [N]: weight of each sample, 1 / (samples of its trajectory); None if every weight is 1."""
        if self.trajectory_N is None:
            return None
        return 1.0 / np.bincount(self.trajectory_N)[self.trajectory_N]

    def sum_G(self, values_N: Real[np.ndarray, "N"]) -> Float64[np.ndarray, "G"]:
        """Return float64 [G]: the sum of each group's trajectory values. A trajectory's value is the mean over its samples."""
        weights_N = self.weights_N
        weighted_N = values_N if weights_N is None else values_N * weights_N
        sums_G = np.bincount(self.index_N, weights=weighted_N, minlength=self.count)
        return sums_G.astype(np.float64, copy=False)  # bincount of an empty array returns int64

    def mean_N(self, values_N: Real[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        """Return float64 [N]: for each sample, the mean of its group's trajectory values."""
        means_G = self.sum_G(values_N) / np.maximum(self.sizes_G, 1)
        return means_G[self.index_N]

    def trajectory_mean_N(self, values_N: Real[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        """Return float64 [N]: for each sample, the mean value of its trajectory's samples."""
        if self.trajectory_N is None:
            return np.asarray(values_N, np.float64)
        sums = np.bincount(self.trajectory_N, weights=values_N)
        return (sums / np.bincount(self.trajectory_N))[self.trajectory_N]


def _numbered(ids_N: Shaped[np.ndarray, "N"]) -> tuple[np.ndarray, int]:
    """Return the index of each id among the distinct ids in order of first appearance, int64 [N], and how many distinct ids there are."""
    _, first, inverse = np.unique(ids_N, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))
    return order[inverse].astype(np.int64), len(first)


@attrs.frozen(kw_only=True, eq=False)
class Advantages:
    """The result of an estimator: float32 [N] at sample level, a ragged float32 column at token level."""

    advantages: Float32[np.ndarray, "N"] | Ragged
    returns: Float32[np.ndarray, "N"] | Ragged | None = None
    """Targets of the value function; None without a value function."""
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    """Further metrics to log, by name, such as the number of groups with one sample."""


class AdvantageEstimator(ColumnPlugin):
    """Turns the rewards of samples or tokens into advantages, and into returns for a value function."""

    scope: ClassVar[Literal["sample", "group", "batch"]]
    """Samples that the estimator must see together and that stay together when a batch is split: a sample, a group, or the batch.

    With `batch`, a rank may hold a part of the batch that consists of whole groups. Moments of the whole batch then need
    `context.reduction`, which every rank calls equally often.
    """
    level: ClassVar[Literal["sample", "token"]]
    """Level of the estimates: `sample` works on scalars, on the controller; `token` on token columns, in the workers."""
    aggregation: ClassVar[str | None] = None
    """The loss aggregation that the estimator's paper prescribes, used if the loss prescribes none; None if the paper prescribes none."""

    @classmethod
    def min_group_size(cls, config: PluginConfig) -> int:
        """Return the smallest number of samples per prompt with which the estimator makes sense under this config."""
        return 1

    @abstractmethod
    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        """Estimate an advantage for each sample or each response token.

        Args:
            columns: `scores`, finite float32 [N], and the columns of `requires`; at token level also
                `token_rewards` and `response_mask` (ragged). Compute moments of the batch with
                `context.reduction`, since a rank may hold only a part of the batch.
            groups: the groups and trajectories of the samples. A group with fewer than two samples left after
                failures gets the advantage 0.
        """
