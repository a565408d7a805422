"""LengthLimit: stops a run whose responses grow too long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.batch import Batch
from dovetail.errors import NumericsError
from dovetail.interfaces import Stage
from stagekit.config import LengthLimitConfig

if TYPE_CHECKING:
    from dovetail.interfaces import PlanFacts, StepContext


class LengthLimit(Stage):
    """Checks the mean length of a step's responses before anything is trained on them."""

    name = "length_limit"
    api = ">=1.0,<2"
    Config = LengthLimitConfig
    phase = "check"

    @classmethod
    def requires(cls, config: Any, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"response_ids", "sample_id"})

    def run(self, batch: Batch, step: StepContext) -> Batch:
        lengths_N = batch["response_ids"].lengths
        mean = float(lengths_N.mean())
        step.metrics["stagekit/length"] = mean
        if mean > self.config.max_mean:
            longest = int(lengths_N.argmax())
            raise NumericsError(
                f"the mean response has {mean:g} tokens; expected at most {self.config.max_mean:g}",
                hint="raise `max_mean` of the stage length_limit, or penalise length in the reward",
                sample_ids=[batch["sample_id"][longest]],
            )
        return batch
