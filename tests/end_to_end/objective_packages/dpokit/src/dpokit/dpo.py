"""DPO: direct preference optimization (arXiv 2305.18290). N samples in P pairs, T response tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.batch import Batch
from dovetail.errors import ColumnError
from dovetail.interfaces import OUTPUTS, Objective, ObjectiveTerm, OutputSpec, Reduction
from dovetail.metrics import Mean
from dovetail_stages import all_finite, mean_metric, on_device, sum_by_sample, token_column
from dpokit.config import DpoConfig


class Dpo(Objective):
    """L = −1/P Σ_p log σ(β (r(chosen_p) − r(rejected_p))), r = Σ_t log π_t − log π_ref,t."""

    name = "kit_dpo"
    api = ">=1.0,<2"
    Config = DpoConfig
    unit = "pair"

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"response_mask", "ref_log_probs", "chosen"})

    @classmethod
    def outputs(cls, config: Any) -> tuple[OutputSpec, ...]:
        return (OUTPUTS["log_probs"],)

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Batch:
        pair_N, chosen_N = mini_batch["pair_id"], mini_batch["chosen"]
        if sorted(pair_N[chosen_N]) != sorted(set(pair_N)) or 2 * sum(chosen_N) != len(chosen_N):
            raise ColumnError("a pair has not one chosen and one rejected response")
        return mini_batch

    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        return {"pairs": float(reduction.sum(np.array([len(mini_batch) / 2], np.float64))[0])}

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
        ref_T = token_column(micro_batch, "ref_log_probs", mask, mask_T, log_probs_T)
        rewards_N = sum_by_sample(log_probs_T - ref_T, on_device(mask.offsets, log_probs_T))
        # The chosen responses and the rejected ones, each in the order of their pairs.
        order_N = np.lexsort((micro_batch["pair_id"], ~micro_batch["chosen"]))
        chosen_P, rejected_P = rewards_N[on_device(order_N, rewards_N)].reshape(
            2, len(order_N) // 2
        )
        margins_P = self.config.beta * (chosen_P - rejected_P)
        pairs = denominators["pairs"]
        loss = torch.nn.functional.softplus(-margins_P).sum() / pairs
        return ObjectiveTerm(
            loss=loss,
            metrics={
                "dpo/loss": Mean(loss.detach(), len(margins_P) / pairs),
                "dpo/accuracy": mean_metric(margins_P > 0, torch.ones_like(margins_P) > 0),
            },
            finite=all_finite(loss, {"log_probs": log_probs_T}),
        )
