"""Objectives that write into the model's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from dovetail.batch import Batch
from dovetail.interfaces import OUTPUTS, Objective, ObjectiveTerm, OutputSpec, Reduction
from dovetail_stages import all_finite


class _Halved(Objective):
    """The objective −Σ x / 2 of an output x."""

    api = ">=1.0,<2"
    output = ""

    @classmethod
    def outputs(cls, config: Any) -> tuple[OutputSpec, ...]:
        return (OUTPUTS[cls.output],)

    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        return {"all": float(reduction.sum(np.array([2.0]))[0])}

    def term(
        self,
        outputs: Mapping[str, Tensor],
        micro_batch: Batch,
        denominators: Mapping[str, float],
        scalars: Mapping[str, float],
    ) -> ObjectiveTerm:
        loss = -outputs[self.output].div_(denominators["all"]).sum()
        return ObjectiveTerm(loss=loss, metrics={}, finite=all_finite(loss, {}))


class lm(_Halved):
    """Of log-probabilities."""

    name = "halved_log_probs"
    output = "log_probs"


class value(_Halved):
    """Of values."""

    name = "halved_values"
    output = "values"
