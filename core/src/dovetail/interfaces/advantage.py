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
    """Which samples answer the same prompt, and which of them are parts of one trajectory.

    An agent's episode may come as several training sequences. Sizes, sums and means count such a trajectory
    once: each of its sequences weighs 1 / (sequences of the trajectory).

    Attributes:
        index_N: int64 [N], the dense group number of each sample, 0 … count − 1.
        count: number of groups.
        trajectory_N: int64 [N], the dense trajectory number of each sample, unique over all groups; None
            where every sample is a trajectory of its own.
    """

    index_N: Int64[np.ndarray, "N"]
    count: int
    trajectory_N: Int64[np.ndarray, "N"] | None = None

    @classmethod
    def of(
        cls, ids_N: Shaped[np.ndarray, "N"], trajectory_ids_N: Shaped[np.ndarray, "N"] | None = None
    ) -> Groups:
        """Number groups and trajectories of arbitrary ids densely, in order of first appearance.

        Args:
            ids_N: [N], one id a group, of any dtype that sorts.
            trajectory_ids_N: [N], one id a trajectory, unique within a group at least.
        """
        index_N, count = _numbered(ids_N)
        if trajectory_ids_N is None:
            return cls(index_N, count)
        trajectory_N, trajectories = _numbered(trajectory_ids_N)
        # Ids need only be unique within a group: the pair tells trajectories of two groups apart.
        trajectory_N, trajectories = _numbered(index_N * trajectories + trajectory_N)
        return cls(index_N, count, trajectory_N if trajectories < len(index_N) else None)

    @property
    def sizes_G(self) -> Int64[np.ndarray, "G"]:
        """int64 [G]: trajectories in each group."""
        weights_N = self.weights_N
        if weights_N is None:
            return np.bincount(self.index_N, minlength=self.count)
        sizes_G = np.bincount(self.index_N, weights=weights_N, minlength=self.count)
        return np.rint(sizes_G).astype(np.int64)

    @property
    def weights_N(self) -> Float64[np.ndarray, "N"] | None:
        """float64 [N]: 1 / (sequences of the sample's trajectory); None where every weight is 1."""
        if self.trajectory_N is None:
            return None
        return 1.0 / np.bincount(self.trajectory_N)[self.trajectory_N]

    def sum_G(self, values_N: Real[np.ndarray, "N"]) -> Float64[np.ndarray, "G"]:
        """Return float64 [G]: sum over each group's trajectories of the mean value of a trajectory's sequences."""
        weights_N = self.weights_N
        weighted_N = values_N if weights_N is None else values_N * weights_N
        sums_G = np.bincount(self.index_N, weights=weighted_N, minlength=self.count)
        return sums_G.astype(np.float64, copy=False)  # without any value bincount gives integers

    def mean_N(self, values_N: Real[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        """Return float64 [N]: for each sample, the mean of its group."""
        means_G = self.sum_G(values_N) / np.maximum(self.sizes_G, 1)
        return means_G[self.index_N]

    def trajectory_mean_N(self, values_N: Real[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        """Return float64 [N]: for each sample, the mean over the sequences of its trajectory; itself where there is one."""
        if self.trajectory_N is None:
            return np.asarray(values_N, np.float64)
        sums = np.bincount(self.trajectory_N, weights=values_N)
        return (sums / np.bincount(self.trajectory_N))[self.trajectory_N]


def _numbered(ids_N: Shaped[np.ndarray, "N"]) -> tuple[np.ndarray, int]:
    """Dense numbers (int64 [N]) of ids in order of first appearance, and how many there are."""
    _, first, inverse = np.unique(ids_N, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))
    return order[inverse].astype(np.int64), len(first)


@attrs.frozen(kw_only=True, eq=False)
class Advantages:
    """The result of an estimator: float32 [N] at sample level, a ragged float32 column at token level."""

    advantages: Float32[np.ndarray, "N"] | Ragged
    returns: Float32[np.ndarray, "N"] | Ragged | None = None
    """Targets of a value function, where there is one."""
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    """Further figures to log, such as the number of groups of one sample."""


class AdvantageEstimator(ColumnPlugin):
    """Turns rewards into advantages."""

    scope: ClassVar[Literal["sample", "group", "batch"]]
    """Unit whose samples the estimator must see together, kept whole when a batch is split: a sample, a group, or the batch.

    With `batch`, moments of the whole batch go through `context.reduction`, which every rank calls equally often; each rank may hold a
    part of the batch, made of whole groups.
    """
    level: ClassVar[Literal["sample", "token"]]
    """Level of the estimates: `sample` works on scalars, on the controller; `token` on token columns, in the workers."""
    aggregation: ClassVar[str | None] = None
    """The loss aggregation that the paper prescribes, where it prescribes one and the loss does not."""

    @classmethod
    def min_group_size(cls, config: PluginConfig) -> int:
        """Return the fewest samples a prompt with which the estimator makes sense under this config."""
        return 1

    @abstractmethod
    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        """Estimate advantages.

        Args:
            columns: at sample level `scores` float32 [N] and what `requires` names; at token level
                `token_rewards`, `response_mask` (ragged) too. Batch moments go through
                `context.reduction`, since a rank may hold only a part of the batch.
            groups: which samples answer the same prompt, and which belong to one trajectory; a group with fewer than
                two samples left after failures gets 0. All scores are finite.
        """
