"""ClipAdvantages: bounds the advantages, of samples or of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import Stage
from stagekit.config import ClipAdvantagesConfig

if TYPE_CHECKING:
    from dovetail.interfaces import PlanFacts, StepContext

COLUMN = "advantages"


class ClipAdvantages(Stage):
    """A'_i = max(−bound, min(bound, A_i))."""

    name = "clip_advantages"
    api = ">=1.0,<2"
    Config = ClipAdvantagesConfig
    phase = "estimate"

    @classmethod
    def requires(cls, config: Any, facts: PlanFacts) -> frozenset[str]:
        return frozenset({COLUMN})

    @classmethod
    def rewrites(cls, config: Any, facts: PlanFacts) -> frozenset[str]:
        return frozenset({COLUMN})

    def run(self, batch: Batch, step: StepContext) -> Batch:
        advantages, bound = batch[COLUMN], self.config.bound
        if isinstance(advantages, Ragged):
            clipped: Any = advantages.with_values(np.clip(advantages.values, -bound, bound))
        else:
            clipped = np.clip(advantages, -bound, bound)
        return batch.with_columns({COLUMN: clipped})
