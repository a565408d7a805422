"""Objective: what an engine minimises, built from an ObjectiveSpec in the worker that uses it.

    loss = Σ policy loss / D  +  c_kl · Σ KL / D  −  c_entropy · Σ entropy / D

where Σ is the loss aggregation's total over tokens, and D its denominator over the whole mini-batch. Every
micro-batch gives its own part of the sum, already divided: adding the parts' gradients is all that is left.
Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import cast

import attrs
import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces.objective import ObjectiveSpec
from dovetail.interfaces.plugin import LocalReduction, PluginContext, Reduction
from dovetail.interfaces.policy_loss import LossAggregation, LossInputs, PolicyLoss
from dovetail.interfaces.runtime import PluginRef
from dovetail.numerics.deferred import mean_metric
from dovetail.numerics.kl import estimate_kl
from dovetail.plugins.load import make
from dovetail.telemetry.metrics import Mean, Metric

KEPT = 32
"""Plugins kept for later objectives: a KL weight that moves makes a new spec every step."""


@attrs.frozen(kw_only=True, eq=False)
class ObjectiveTerm:
    """One micro-batch's part of the objective.

    Attributes:
        loss: float32 [], a sum that is already divided by the mini-batch's denominators; carries the gradient.
        metrics: figures that may still be tensors; `dovetail.numerics.resolve_metrics` fetches and merges them.
    """

    loss: Float[Tensor, ""]
    metrics: Mapping[str, Metric]


class Objective:
    """Policy loss, KL penalty and entropy bonus over packed samples."""

    def __init__(
        self, spec: ObjectiveSpec, policy_loss: PolicyLoss, aggregation: LossAggregation
    ) -> None:
        self.spec = spec
        self._loss = policy_loss
        self._aggregation = aggregation
        self._loss_columns = type(policy_loss).requires(policy_loss.config) - {"log_probs"}

    @property
    def outputs(self) -> frozenset[str]:
        """What the engine must compute with gradient: `log_probs`, and `entropies` where they are used."""
        return self.spec.outputs

    @property
    def requires(self) -> frozenset[str]:
        """Columns that a mini-batch must carry."""
        columns = {"response_mask"} | self._loss_columns | self.spec.requires
        if self.spec.kl is not None:
            columns |= {"ref_log_probs"}
        if self.spec.old_log_probs_from_current:
            columns -= {"old_log_probs"}
        return frozenset(columns)

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
        mini_batch.require(sorted(self.requires), f"the objective with policy loss {self._name!r}")
        loss = self._aggregation.denominator(mini_batch["response_mask"])
        own = np.array([loss, len(mini_batch)], np.float64)
        summed, samples = (reduction or LocalReduction()).sum(own).tolist()
        return {"loss": loss if self._aggregation.constant else summed, "samples": samples}

    def __call__(
        self,
        outputs: Mapping[str, Float[Tensor, "T"]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
    ) -> ObjectiveTerm:
        """This micro-batch's part of the loss.

        Args:
            outputs: `log_probs` and, where `self.outputs` names them, `entropies`: float32 [T] each, aligned
                with the packed `response_mask`; masked tokens hold 0. They carry the gradient.
            micro_batch: some whole samples of the mini-batch, with the columns that `requires` names.
            denominators: of the whole mini-batch.

        Raises:
            ColumnError: a column does not line up with the response tokens.
        """
        log_probs_T = outputs["log_probs"]
        mask = cast("Ragged", micro_batch["response_mask"])
        mask_T = _on(mask.values, log_probs_T).bool()
        offsets_N1 = _on(mask.offsets, log_probs_T)
        tokens = mask_T.sum()

        def aggregate(losses_T: Float[Tensor, "T"]) -> Float[Tensor, ""]:
            total = self._aggregation.total(losses_T, mask_T, offsets_N1)
            return total / (denominators["loss"] or 1.0)

        inputs = LossInputs(
            log_probs_T=log_probs_T,
            mask_T=mask_T,
            offsets_N1=offsets_N1,
            columns=self._columns(micro_batch, mask, log_probs_T),
        )
        policy = self._loss.token_losses(inputs)
        loss = pg_loss = aggregate(policy.losses_T)
        metrics: dict[str, Metric] = dict(policy.metrics)
        # Weights that add up to 1 over a mini-batch: sums within it, a mean over several.
        weight = len(micro_batch) / (denominators["samples"] or 1.0)

        if self.spec.kl is not None:
            ref_log_probs_T = _token_column(micro_batch, "ref_log_probs", mask, log_probs_T)
            kl_T = estimate_kl(self.spec.kl.estimator, log_probs_T, ref_log_probs_T)
            kl_loss = aggregate(kl_T)
            loss = loss + self.spec.kl.coef * kl_loss
            metrics["actor/kl"] = mean_metric(kl_T, mask_T, tokens)
            metrics["actor/kl_loss"] = _share(kl_loss, weight)
        if "entropies" in self.outputs:
            metrics["actor/entropy"] = mean_metric(outputs["entropies"], mask_T, tokens)
            if self.spec.entropy_coef:
                loss = loss - self.spec.entropy_coef * aggregate(outputs["entropies"])

        metrics["actor/pg_loss"] = _share(pg_loss, weight)
        metrics["actor/loss"] = _share(loss, weight)
        return ObjectiveTerm(loss=loss, metrics=metrics)

    @property
    def _name(self) -> str:
        return self.spec.policy_loss.name

    def _columns(
        self, batch: Batch, mask: Ragged, log_probs_T: Float[Tensor, "T"]
    ) -> dict[str, Float[Tensor, "T"]]:
        from_current = (
            {"old_log_probs"} & self._loss_columns
            if self.spec.old_log_probs_from_current
            else set()
        )
        columns = {
            name: _token_column(batch, name, mask, log_probs_T)
            for name in sorted(self._loss_columns - from_current - {"response_mask"})
        }
        return columns | dict.fromkeys(from_current, log_probs_T.detach())


def build_objective(spec: ObjectiveSpec) -> Objective:
    """Make the objective that the spec names, through the plugin index. Plugins made before are used again.

    Raises:
        PluginError: a plugin that it names can't be found or loaded here.
    """
    return Objective(
        spec,
        cast("PolicyLoss", _plugin(spec.policy_loss)),
        cast("LossAggregation", _plugin(spec.loss_aggregation)),
    )


@functools.lru_cache(maxsize=KEPT)
def _kept_plugin(ref: PluginRef) -> object:
    return make(ref, PluginContext())


def _plugin(ref: PluginRef) -> object:
    try:
        hash(ref)
    except TypeError:
        # A config with a dict in it can't be a key.
        return make(ref, PluginContext())
    return _kept_plugin(ref)


def _share(loss: Float[Tensor, ""], weight: float) -> Mean:
    return Mean(cast("float", loss.detach()), weight)


def _token_column(
    batch: Batch, name: str, mask: Ragged, like: Float[Tensor, "T"]
) -> Float[Tensor, "T"]:
    """A column as float32 [T] on the device of `like`; a sample-level one is repeated over its tokens."""
    values = batch[name]
    if isinstance(values, Ragged):
        if not np.array_equal(values.offsets, mask.offsets):
            raise ColumnError(
                f"column {name!r} does not line up with response_mask: it has {len(values.values)} values "
                f"over {len(values)} samples, the mask {len(mask.values)}",
                hint="one value a response token, or one a sample",
            )
        return _on(values.values, like).to(like.dtype)
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        raise ColumnError(
            f"column {name!r} is no number a token or a sample, so no loss can read it"
        )
    return _on(np.repeat(values, mask.lengths), like).to(like.dtype)


def _on(values: Shaped[np.ndarray, "K"], like: Tensor) -> Shaped[Tensor, "K"]:
    # Arrays that came over the wire are read-only, which torch takes badly.
    return torch.from_numpy(np.require(values, requirements=["C", "W"])).to(like.device)
