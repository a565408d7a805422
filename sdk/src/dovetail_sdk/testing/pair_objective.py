"""PairMargin: an objective that compares the two samples of a pair. An engine that trains on it must keep the pair together."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dovetail.batch import Batch
from dovetail.interfaces import (
    OUTPUTS,
    Objective,
    ObjectiveTerm,
    OutputSpec,
    PluginConfig,
    Reduction,
)
from dovetail_stages import all_finite, mean_metric, on_device, pair_rows, sum_by_sample


class PairMargin(Objective):
    """Loss that rewards a higher log-probability of the chosen response of each pair than of the rejected response.

    L = 1/P Σ_p softplus(Σ_t log π(rejected_t) − Σ_t log π(chosen_t)), over P pairs p and tokens t.
    """

    unit = "pair"

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"chosen"})

    @classmethod
    def outputs(cls, config: PluginConfig) -> tuple[OutputSpec, ...]:
        return (OUTPUTS["log_probs"],)

    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        own = np.array([len(mini_batch) / 2], np.float64)
        return {"pairs": float(reduction.sum(own)[0])}

    def term(
        self,
        outputs: Mapping[str, Tensor],
        micro_batch: Batch,
        denominators: Mapping[str, float],
        scalars: Mapping[str, float],
    ) -> ObjectiveTerm:
        mask = micro_batch["response_mask"]
        mask_T = on_device(mask.values, outputs["log_probs"])
        log_probs_T = outputs["log_probs"].masked_fill(~mask_T, 0)
        sums_N = sum_by_sample(log_probs_T, on_device(mask.offsets, log_probs_T))
        chosen_P, rejected_P = (sums_N[on_device(rows, sums_N)] for rows in pair_rows(micro_batch))
        margins_P = chosen_P - rejected_P
        loss = torch.nn.functional.softplus(-margins_P).sum() / (denominators["pairs"] or 1.0)
        return ObjectiveTerm(
            loss=loss,
            metrics={"actor/margin": mean_metric(margins_P, torch.ones_like(margins_P) > 0)},
            finite=all_finite(loss, {"log_probs": log_probs_T}),
        )
