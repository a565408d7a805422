"""SampleFilter: leaves scored samples out of training."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from dovetail.interfaces.plugin import ColumnPlugin, PluginConfig

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool

    from dovetail.batch.batch import Batch
    from dovetail.interfaces.advantage import Groups


class SampleFilter(ColumnPlugin):
    """Chooses among the samples of a rollout, by their rewards, lengths or any other column of rollout and reward."""

    action: ClassVar[Literal["drop", "mask"]]
    """Treatment of samples that are not kept. `drop`: they leave the batch, and an empty group is replaced by another prompt in the next
    round of generation (`algorithm.max_generation_rounds`). `mask`: they count in their group's statistics, but have no loss."""

    @classmethod
    def action_of(cls, config: PluginConfig) -> Literal["drop", "mask"]:
        """Return the filter's action under this config: `action`, unless a filter leaves the choice to its user."""
        return cls.action

    @abstractmethod
    def keep(self, columns: Batch, groups: Groups) -> Bool[np.ndarray, "N"]:
        """Return bool [N]: True for the samples to train on.

        Args:
            columns: the columns of rollout and reward, before any shaping of the reward.
            groups: which samples answer one prompt; groups are always whole.
        """
