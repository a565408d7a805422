"""Objective: what an engine minimises, whatever it is; and what a micro-batch gives.

An engine does the same for all of them: `prepare` the mini-batch once, ask for the `denominators` of the whole, and
then call the objective for every micro-batch. Each gives its own part of a sum that is already divided, so that
adding the parts' gradients is all that is left. Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import cast

import attrs
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dovetail.batch.batch import Batch
from dovetail.interfaces.plugin import LocalReduction, Reduction
from dovetail.interfaces.policy_loss import LossAggregation
from dovetail.metrics import Mean, Metric
from dovetail.numerics.finite import require_finite


@attrs.frozen(kw_only=True, eq=False)
class ObjectiveTerm:
    """One micro-batch's part of the objective.

    Attributes:
        loss: float32 [], a sum that is already divided by the mini-batch's denominators; carries the gradient.
        metrics: figures that may still be tensors; `dovetail.numerics.resolve_metrics` fetches and merges them.
        finite: bool [], whether the loss and every output that it was made of is finite. An output may be NaN
            where neither loss nor gradient shows it, as where a token is clipped or rejected.
    """

    loss: Float[Tensor, ""]
    metrics: Mapping[str, Metric]
    finite: Bool[Tensor, ""]


class Objective(ABC):
    """A loss over packed samples that no cut into micro-batches can change."""

    def __init__(self, aggregation: LossAggregation, title: str) -> None:
        self._aggregation = aggregation
        self._title = title

    @property
    @abstractmethod
    def outputs(self) -> frozenset[str]:
        """What the engine must compute with gradient, such as `log_probs`."""

    @property
    @abstractmethod
    def requires(self) -> frozenset[str]:
        """Columns that a mini-batch must carry."""

    def prepare(self, mini_batch: Batch, reduction: Reduction | None = None) -> Batch:
        """Check the mini-batch, and add the columns that the loss makes of it as a whole.

        Args:
            mini_batch: this rank's part of it, with what `requires` names.
            reduction: sums over the ranks that hold the other parts; by default there are none.

        Raises:
            ColumnError: a column is missing.
            NumericsError: a column is not finite where the mask is 1; it carries the samples' ids.
        """
        mini_batch.require(sorted(self.requires), self._title)
        require_finite(mini_batch, self.requires, reduction or LocalReduction(), self._title)
        return mini_batch

    def denominators(
        self, mini_batch: Batch, reduction: Reduction | None = None
    ) -> Mapping[str, float]:
        """What sums over the whole mini-batch are divided by: `loss`, and `samples` for metrics.

        Args:
            mini_batch: this rank's part of it; needs `response_mask`.
            reduction: sums over the ranks that hold the other parts; by default there are none.

        Raises:
            ColumnError: the mini-batch lacks a column that the objective requires.
        """
        mini_batch.require(sorted(self.requires), self._title)
        loss = self._aggregation.denominator(mini_batch["response_mask"])
        own = np.array([loss, len(mini_batch)], np.float64)
        summed, samples = (reduction or LocalReduction()).sum(own).tolist()
        return {"loss": loss if self._aggregation.constant else summed, "samples": samples}

    @abstractmethod
    def __call__(
        self,
        outputs: Mapping[str, Float[Tensor, "T"]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
    ) -> ObjectiveTerm:
        """This micro-batch's part of the loss.

        Args:
            outputs: what `self.outputs` names: float32 [T] each, aligned with the packed `response_mask`.
                They carry the gradient; what masked tokens hold does not matter.
            micro_batch: some whole samples of the prepared mini-batch.
            denominators: of the whole mini-batch.

        Raises:
            ColumnError: a column does not line up with the response tokens.
        """


def metric_weight(micro_batch: Batch, denominators: Mapping[str, float]) -> float:
    """A micro-batch's share of the samples: weights add up to 1 over a mini-batch, so that a `loss_share` is a sum
    within it and a mean over several.
    """
    return len(micro_batch) / (denominators["samples"] or 1.0)


def loss_share(loss: Float[Tensor, ""], weight: float) -> Mean:
    """A micro-batch's part of a mini-batch's loss as a metric, not yet fetched."""
    return Mean(cast("float", loss.detach()), weight)


def all_finite(
    loss: Float[Tensor, ""], outputs: Mapping[str, Float[Tensor, "T"]]
) -> Bool[Tensor, ""]:
    """Whether the loss and all outputs [T] are finite, bool []; nothing is fetched."""
    checks = [torch.isfinite(values_T.detach()).all() for values_T in outputs.values()]
    return torch.stack([torch.isfinite(loss.detach()), *checks]).all()
