"""What the token-level estimators share. T tokens, N samples."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import AdvantageEstimator


class TokenEstimator(AdvantageEstimator):
    """An estimator that gives every token of the policy an advantage and a return; other tokens hold 0."""

    api: ClassVar[str] = ">=1.0,<2"
    capabilities: ClassVar[frozenset[str]] = frozenset({"deterministic"})
    level = "token"

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"token_rewards", "response_mask"})

    @classmethod
    def provides(cls, config: Any) -> frozenset[str]:
        return frozenset({"advantages", "returns"})

    def mask(self, columns: Batch) -> Ragged:
        """`response_mask`, once all required columns are known to be there.

        Raises:
            ColumnError: one is missing.
        """
        columns.require(sorted(self.requires(self.config)), f"advantage estimator {self.name!r}")
        mask: Ragged = columns["response_mask"]
        return mask if mask.dtype == np.bool_ else mask.with_values(mask.values != 0)
