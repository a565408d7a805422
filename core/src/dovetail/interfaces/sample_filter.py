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
    """Chooses the samples to train on, by rewards, lengths or any other column of rollout and reward."""

    action: ClassVar[Literal["drop", "mask"]]
    """Treatment of samples that the filter rejects. `drop`: the samples leave the batch, and another prompt replaces an empty group in the
    next round of generation (`algorithm.max_generation_rounds`). `mask`: the samples count in their group's statistics, but have no loss."""

    @classmethod
    def action_of(cls, config: PluginConfig) -> Literal["drop", "mask"]:
        """Return the filter's action under this config: `action`, unless the filter's config offers a choice."""
        return cls.action

    @abstractmethod
    def keep(self, columns: Batch, groups: Groups) -> Bool[np.ndarray, "N"]:
        """Return bool [N]: True for the samples to train on.

        Args:
            columns: the columns of rollout and reward, before any shaping of the reward.
            groups: the group of each sample; groups are always whole.
        """
