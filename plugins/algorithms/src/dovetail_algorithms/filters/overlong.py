"""Overlong filtering: masks the loss of truncated responses (DAPO, arXiv 2503.14476, section 3.4)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool

from dovetail.batch import Batch
from dovetail.interfaces import Groups, PluginConfig, SampleFilter


class Overlong(SampleFilter):
    """Leaves truncated responses without a loss: overlong filtering (DAPO, arXiv 2503.14476, section 3.4).

    keep sample i  ⇔  no sample of its trajectory has the finish_reason `length`

    The reward of a truncated response says little about its reasoning. Such a response still counts in its
    group's mean and spread, but its tokens have no loss.
    """

    name = "overlong"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    action = "mask"

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"finish_reason"})

    def keep(self, columns: Batch, groups: Groups) -> Bool[np.ndarray, "N"]:
        """Return a mask, bool [N]: False for truncated samples, and for the other samples of their trajectories."""
        columns.require(["finish_reason"], "sample filter 'overlong'")
        truncated_N = np.array([r == "length" for r in columns["finish_reason"]], np.bool_)
        return groups.trajectory_mean_N(truncated_N.astype(np.float64)) == 0
