"""ResponseObjective: the base class of objectives that compute one loss for each response, not for each token or pair.

Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from jaxtyping import Float
from torch import Tensor

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import OUTPUTS, Objective, ObjectiveTerm, OutputSpec, Reduction
from dovetail.metrics import Metric
from dovetail.sections import PluginSection
from dovetail_stages import (
    all_finite,
    loss_share,
    mean_metric,
    on_device,
    sum_by_sample,
    token_column,
)


class ResponseObjective(Objective):
    """Base of objectives that average a function ℓ of each response's log-ratio r to a reference policy. Samples without a policy token
    have no effect.

        L = 1/N Σ_i ℓ(r_i),   r_i = Σ_t m_t log(π(y_t | x, y_<t) / π_ref(y_t | x, y_<t))

    m is the response mask. Subclasses define ℓ.
    """

    reference: ClassVar[str] = "ref_log_probs"
    """Name of the column with log π_ref of each response token."""
    prefix: ClassVar[str] = "actor"
    """Prefix of the metrics' names."""

    @classmethod
    def outputs(cls, config: PluginSection) -> tuple[OutputSpec, ...]:
        return (OUTPUTS["log_probs"],)

    @abstractmethod
    def losses(
        self, log_ratios_N: Float[Tensor, "N"], micro_batch: Batch
    ) -> tuple[Float[Tensor, "N"], Mapping[str, Tensor]]:
        """Return the loss of each response, and, by metric name, values [N] whose mean is the metric."""

    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        own = np.array([(mini_batch["response_mask"].sum() > 0).sum()], np.float64)
        return {"samples": float(reduction.sum(own)[0])}

    def term(
        self,
        outputs: Mapping[str, Float[Tensor, "T"]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
        scalars: Mapping[str, float],
    ) -> ObjectiveTerm:
        """Compute the loss term (see `Objective.term`). Metrics: `<prefix>/loss`, and the means of the values that `losses` returns."""
        mask: Ragged = micro_batch["response_mask"]
        mask_T = on_device(mask.values, outputs["log_probs"]).bool()
        log_probs_T = outputs["log_probs"].masked_fill(~mask_T, 0)
        reference_T = token_column(micro_batch, self.reference, mask, mask_T, log_probs_T)
        offsets_N1 = on_device(mask.offsets, log_probs_T)
        log_ratios_N = sum_by_sample(log_probs_T - reference_T, offsets_N1)
        losses_N, figures = self.losses(log_ratios_N, micro_batch)
        there_N = on_device(mask.sum() > 0, log_ratios_N)
        samples = denominators["samples"] or 1.0
        loss = losses_N.masked_fill(~there_N, 0).sum() / samples
        metrics: dict[str, Metric] = {
            f"{self.prefix}/loss": loss_share(loss, int(there_N.sum()) / samples),
            **{f"{self.prefix}/{k}": mean_metric(v_N, there_N) for k, v_N in figures.items()},
        }
        return ObjectiveTerm(
            loss=loss, metrics=metrics, finite=all_finite(loss, {"log_probs": log_probs_T})
        )
