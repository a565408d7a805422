"""AdvantageEstimator: rewards to advantages and returns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
import numpy as np

from dovetail.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from jaxtyping import Float32, Float64, Int64, Real, Shaped

    from dovetail.batch import Batch, Ragged

ADVANTAGE_API = "1.1"


@attrs.frozen(eq=False)
class Groups:
    """Which samples answer the same prompt.

    Attributes:
        index_N: int64 [N], the dense group number of each sample, 0 … count − 1.
        count: number of groups.
    """

    index_N: Int64[np.ndarray, "N"]
    count: int

    @classmethod
    def of(cls, ids_N: Shaped[np.ndarray, "N"]) -> Groups:
        """Number the groups of arbitrary ids densely, in order of first appearance."""
        _, first, inverse = np.unique(ids_N, return_index=True, return_inverse=True)
        order = np.argsort(np.argsort(first))
        return cls(order[inverse].astype(np.int64), len(first))

    @property
    def sizes_G(self) -> Int64[np.ndarray, "G"]:
        """int64 [G]: samples in each group."""
        return np.bincount(self.index_N, minlength=self.count)

    def sum_G(self, values_N: Real[np.ndarray, "N"]) -> Float64[np.ndarray, "G"]:
        """float64 [G]: sum of the values of each group."""
        return np.bincount(self.index_N, weights=values_N, minlength=self.count)

    def mean_N(self, values_N: Real[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        """float64 [N]: for each sample, the mean of its group."""
        means_G = self.sum_G(values_N) / np.maximum(self.sizes_G, 1)
        means_N: np.ndarray = means_G[self.index_N]
        return means_N


@attrs.frozen(kw_only=True, eq=False)
class Advantages:
    """What an estimator returns: float32 [N] at sample level, a ragged float32 column at token level."""

    advantages: Float32[np.ndarray, "N"] | Ragged
    returns: Float32[np.ndarray, "N"] | Ragged | None = None
    """Targets of a value function, where there is one."""
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    """Further figures to log, such as counted groups of one."""


class AdvantageEstimator(Plugin):
    """Turns rewards into advantages."""

    scope: ClassVar[Literal["sample", "group", "batch"]]
    """What must be seen together: it is kept whole when a batch is split."""
    level: ClassVar[Literal["sample", "token"]]
    """Sample level works on scalars on the controller; token level on token columns, in the workers."""

    @classmethod
    def min_group_size(cls, config: Any) -> int:
        """Fewest samples a prompt with which the estimator makes sense under this config."""
        return 1

    @abstractmethod
    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        """Estimate advantages.

        Args:
            columns: at sample level `scores` float32 [N] and what `requires` names; at token level
                `token_rewards`, `response_mask` (ragged) too. Batch moments go through
                `context.reduction`, since a rank may hold only a part of the batch.
            groups: which samples answer one prompt; a group thinned below two by failures gives 0.
        """
