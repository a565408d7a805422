"""REINFORCE++: discounted returns, whitened over the batch (arXiv 2501.03262)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from dovetail.batch import Batch
from dovetail.interfaces.advantage import AdvantageEstimator, Advantages, Groups
from dovetail.numerics import whiten
from dovetail_algorithms.config.estimators import ReinforcePlusPlusConfig
from dovetail_algorithms.estimators.discounted import discounted_returns


class ReinforcePlusPlus(AdvantageEstimator):
    """G_t = R_t + γ G_{t+1} over the policy's own tokens; A = (G − mean) / √(var + 1e-8) over the batch.

    Tokens of tools and observations take no time: returns pass over them undiscounted, and they hold 0.
    """

    name = "reinforce_plus_plus"
    api: ClassVar[str] = ">=1.0,<2"
    capabilities: ClassVar[frozenset[str]] = frozenset({"deterministic"})
    Config = ReinforcePlusPlusConfig
    scope = "batch"
    level = "token"

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"token_rewards", "response_mask"})

    @classmethod
    def provides(cls, config: Any) -> frozenset[str]:
        return frozenset({"advantages", "returns"})

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        columns.require(["token_rewards", "response_mask"], f"advantage estimator {self.name!r}")
        mask = columns["response_mask"]
        mask_T = mask.values.astype(bool)
        returns_T = discounted_returns(
            columns["token_rewards"].values, mask_T, mask.offsets, self.config.gamma
        )
        advantages_T = whiten(returns_T, mask_T, self.context.reduction)
        reach_N = np.bincount(mask.row_index, weights=np.abs(advantages_T), minlength=len(mask))
        silent_G = groups.sum_G(reach_N)[groups.sizes_G > 0] == 0
        return Advantages(
            advantages=mask.with_values(advantages_T),
            returns=mask.with_values(returns_T.astype(np.float32)),
            metrics={
                "advantage/zero_signal_groups": float(np.mean(silent_G)) if silent_G.size else 0.0
            },
        )
