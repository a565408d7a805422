"""PolicyObjective: what a policy minimises, built from an ObjectiveSpec in the worker that uses it.

    loss = Σ w · policy loss / D  +  c_kl · Σ KL / D  −  c_entropy · Σ entropy / D

where Σ is the loss aggregation's total over tokens, D its denominator over the whole mini-batch, and w the weights of
the rollout correction, where there is one. Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dovetail.batch.batch import Batch
from dovetail.batch.ragged import Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces.objective import ObjectiveSpec
from dovetail.interfaces.plugin import LocalReduction, Reduction
from dovetail.interfaces.policy_loss import LossAggregation, LossInputs, PolicyLoss
from dovetail.interfaces.rollout_correction import CorrectionInputs, RolloutCorrection
from dovetail.metrics import Metric
from dovetail.numerics.deferred import mean_metric
from dovetail.numerics.kl import estimate_kl
from dovetail.numerics.objective import (
    Objective,
    ObjectiveTerm,
    all_finite,
    loss_share,
    metric_weight,
)
from dovetail.numerics.plugin_results import (
    DeclaredColumns,
    check_correction,
    check_losses,
    title_of_loss,
)
from dovetail.numerics.token_columns import on_device, token_column

PREPARED = "prepared."
"""Prefix under which the columns of a loss's `prepare` travel in the batch; the loss sees them without it."""
OF_THE_ENGINE = frozenset({"log_probs", "entropies"})
"""What a loss requires of the policy as it is now: the engine computes it, with gradient."""


@attrs.frozen(eq=False)
class _Tokens:
    """The response tokens of a micro-batch: where its columns are read from and what they must line up with."""

    batch: Batch
    mask: Ragged
    mask_T: Bool[Tensor, "T"]
    offsets_N1: Int64[Tensor, "N1"]
    like_T: Float[Tensor, "T"]

    def column(self, name: str) -> Float[Tensor, "T *inner"]:
        return token_column(self.batch, name, self.mask, self.mask_T, self.like_T)


class PolicyObjective(Objective):
    """Policy loss, KL penalty and entropy bonus, with the rollout correction within the update where there is one."""

    def __init__(
        self,
        spec: ObjectiveSpec,
        policy_loss: PolicyLoss,
        aggregation: LossAggregation,
        correction: RolloutCorrection | None = None,
    ) -> None:
        super().__init__(aggregation, f"the objective with policy loss {spec.policy_loss.name!r}")
        self.spec = spec
        self._loss = policy_loss
        self._title = title_of_loss(spec.policy_loss)
        cls, config = type(policy_loss), policy_loss.config
        wanted = cls.requires(config)
        self._loss_outputs = wanted & OF_THE_ENGINE
        self._loss_columns = wanted - OF_THE_ENGINE - {"response_mask"}
        self._prepares = cls.prepares(config)
        mode = type(correction).mode(correction.config) if correction is not None else "disabled"
        self._correction = None if mode == "disabled" else correction
        # A loss with a ratio to the rollout policy corrects for it itself; in bypass mode the old policy is that one.
        anchors = {"rollout_log_probs"} | ({"old_log_probs"} if mode == "bypass" else set())
        self._weighs = not wanted & anchors

    @property
    def outputs(self) -> frozenset[str]:
        """`log_probs`, and `entropies` where they are used."""
        return self.spec.outputs | self._loss_outputs

    @property
    def requires(self) -> frozenset[str]:
        columns = {"response_mask"} | self._loss_columns | self.spec.requires
        if self.spec.kl is not None:
            columns |= {"ref_log_probs"}
        if self.spec.weighted:
            columns |= {"rollout_is_weights"}
        if self._correction is not None:
            columns |= {"rollout_log_probs"}
        columns -= OF_THE_ENGINE
        if self.spec.old_log_probs_from_current:
            columns -= {"old_log_probs"}
        if self._makes_columns:
            columns |= self._prepares | {"sample_id"}
        return frozenset(columns)

    def prepare(self, mini_batch: Batch, reduction: Reduction | None = None) -> Batch:
        """As in `Objective`; the columns that the loss makes are named `prepared.…`.

        Raises:
            ColumnError: a column is missing, or one that the loss makes is not ragged over response tokens.
            NumericsError: a column is not finite where the mask is 1; it carries the samples' ids.
        """
        mini_batch = super().prepare(mini_batch, reduction)
        if not self._makes_columns:
            return mini_batch
        made = self._loss.prepare(mini_batch, reduction or LocalReduction())
        for name, column in made.items():
            if not isinstance(column, Ragged):
                raise ColumnError(
                    f"{self._title} prepared {name!r} as {type(column).__name__}",
                    hint="`prepare` returns ragged columns, one value a response token",
                )
        return mini_batch.with_columns({PREPARED + name: made[name] for name in made})

    def __call__(
        self,
        outputs: Mapping[str, Float[Tensor, "T"]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
    ) -> ObjectiveTerm:
        """As in `Objective`."""
        mask: Ragged = micro_batch["response_mask"]
        mask_T = on_device(mask.values, outputs["log_probs"]).bool()
        outputs = {name: outputs[name].masked_fill(~mask_T, 0) for name in sorted(self.outputs)}
        log_probs_T = outputs["log_probs"]
        offsets_N1 = on_device(mask.offsets, log_probs_T)
        tokens = _Tokens(micro_batch, mask, mask_T, offsets_N1, log_probs_T)
        count = mask_T.sum()

        def aggregate(losses_T: Float[Tensor, "T"]) -> Float[Tensor, ""]:
            total = self._aggregation.total(losses_T, mask_T, offsets_N1)
            return total / (denominators["loss"] or 1.0)

        losses_T, metrics = self._policy_losses(tokens, outputs)
        loss = pg_loss = aggregate(losses_T)
        weight = metric_weight(micro_batch, denominators)
        if self.spec.kl is not None:
            kl_T = estimate_kl(self.spec.kl.estimator, log_probs_T, tokens.column("ref_log_probs"))
            kl_loss = aggregate(kl_T)
            loss = loss + self.spec.kl.coef * kl_loss
            metrics["actor/kl"] = mean_metric(kl_T, mask_T, count)
            metrics["actor/kl_loss"] = loss_share(kl_loss, weight)
        if "entropies" in self.spec.outputs:
            metrics["actor/entropy"] = mean_metric(outputs["entropies"], mask_T, count)
            if self.spec.entropy_coef:
                loss = loss - self.spec.entropy_coef * aggregate(outputs["entropies"])
        metrics["actor/pg_loss"] = loss_share(pg_loss, weight)
        metrics["actor/loss"] = loss_share(loss, weight)
        return ObjectiveTerm(loss=loss, metrics=metrics, finite=all_finite(loss, outputs))

    @property
    def _makes_columns(self) -> bool:
        return type(self._loss).prepare is not PolicyLoss.prepare

    def _policy_losses(
        self, tokens: _Tokens, outputs: Mapping[str, Float[Tensor, "T"]]
    ) -> tuple[Float[Tensor, "T"], dict[str, Metric]]:
        """The loss's own, corrected for a rollout policy that is not the training policy."""
        inputs = LossInputs(
            log_probs_T=outputs["log_probs"],
            mask_T=tokens.mask_T,
            offsets_N1=tokens.offsets_N1,
            columns=DeclaredColumns(self._columns(tokens, outputs), self._title, self._loss),
        )
        found = self._loss.token_losses(inputs)
        check_losses(found, inputs.log_probs_T, self._title, self._loss)
        losses_T, metrics = found.losses_T, dict(found.metrics)
        if self.spec.weighted:
            losses_T = losses_T * tokens.column("rollout_is_weights")
        if self._correction is not None:
            # Over the batch nothing can be summed here: ranks may have different numbers of micro-batches.
            corrected = self._correction.correct(
                CorrectionInputs(
                    train_log_probs_T=inputs.log_probs_T.detach(),
                    rollout_log_probs_T=tokens.column("rollout_log_probs"),
                    mask_T=tokens.mask_T,
                    offsets_N1=tokens.offsets_N1,
                ),
                LocalReduction(),
            )
            check_correction(corrected, inputs.log_probs_T, self._correction)
            if corrected.weights_T is not None and self._weighs:
                losses_T = losses_T * corrected.weights_T.detach().masked_fill(~tokens.mask_T, 0)
            if corrected.keep_T is not None:
                losses_T = losses_T.masked_fill(~corrected.keep_T, 0)
            metrics |= corrected.metrics
        return losses_T, metrics

    def _columns(
        self, tokens: _Tokens, outputs: Mapping[str, Float[Tensor, "T"]]
    ) -> dict[str, Float[Tensor, "T *inner"]]:
        """What the loss reads besides log-probabilities: of the batch, of the engine, and of its own making."""
        names, current = set(self._loss_columns), {}
        if self.spec.old_log_probs_from_current and "old_log_probs" in names:
            names.remove("old_log_probs")
            current["old_log_probs"] = outputs["log_probs"].detach()
        columns = {name: tokens.column(name) for name in sorted(names)} | current
        if "entropies" in self._loss_outputs:
            columns["entropies"] = outputs["entropies"]
        made = [name for name in tokens.batch.names if name.startswith(PREPARED)]
        return columns | {name.removeprefix(PREPARED): tokens.column(name) for name in made}
