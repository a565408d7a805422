"""PolicyObjective: the objective of a policy.

    loss = Σ w · policy loss / D  +  c_kl · Σ KL / D  −  c_entropy · Σ entropy / D

where Σ is the loss aggregation's total over tokens, D its denominator over the whole mini-batch, and w the weights of the rollout
correction, if there is one. Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces import (
    OUTPUTS,
    CorrectionInputs,
    LocalReduction,
    LossAggregation,
    LossInputs,
    Objective,
    ObjectiveTerm,
    OutputSpec,
    PluginContext,
    PolicyLoss,
    Reduction,
    RolloutCorrection,
)
from dovetail.metrics import Metric
from dovetail.plugins import make_plugin, ref_for, title_of
from dovetail.sections import PluginSection
from dovetail_algorithms.config.objectives import PolicyConfig
from dovetail_stages import (
    DeclaredColumns,
    all_finite,
    check_correction,
    check_losses,
    estimate_kl,
    loss_denominators,
    loss_share,
    mean_metric,
    metric_weight,
    on_device,
    token_column,
)

PREPARED = "prepared."
"""Prefix, in the batch, of the columns that a loss's `prepare` adds; the loss sees the names without the prefix."""
OF_THE_ENGINE = frozenset({"log_probs", "entropies"})
"""Outputs of the current policy that a loss may require; the engine computes them, with gradient."""


@attrs.frozen(eq=False)
class _Tokens:
    """The response tokens of a micro-batch, with the mask and offsets that every column must match."""

    batch: Batch
    mask: Ragged
    mask_T: Bool[Tensor, "T"]
    offsets_N1: Int64[Tensor, "N1"]
    like_T: Float[Tensor, "T"]

    def column(self, name: str) -> Float[Tensor, "T *inner"]:
        return token_column(self.batch, name, self.mask, self.mask_T, self.like_T)


class PolicyObjective(Objective):
    """Policy loss, KL penalty and entropy bonus; optionally a rollout correction within the update."""

    name = "policy"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = PolicyConfig
    key_figures = {}  # noqa: RUF012 - its value says nothing of the policy: the reward does
    scalars: ClassVar[Mapping[str, float]] = {"kl_coef": 0.0, "entropy_coef": 0.0}

    def __init__(self, config: PolicyConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._loss, self._aggregation, correction = self.parts(config, context)
        self._title = title_of("policy_loss", self._loss)
        wanted = self._loss.requires(self._loss.config)
        self._loss_outputs = wanted & OF_THE_ENGINE
        self._loss_columns = wanted - OF_THE_ENGINE - {"response_mask"}
        mode = "disabled" if correction is None else correction.mode(correction.config)
        self._correction = None if mode == "disabled" else correction
        # A loss with a ratio to the rollout policy needs no importance weights. In bypass mode, the old policy is the rollout policy.
        anchors = {"rollout_log_probs"} | ({"old_log_probs"} if mode == "bypass" else set())
        self._weighs = not wanted & anchors

    @classmethod
    def parts(
        cls, config: PolicyConfig, context: PluginContext, *, needs: bool = True
    ) -> tuple[PolicyLoss, LossAggregation, RolloutCorrection | None]:
        """Construct the objective's policy loss, loss aggregation and correction, if any; tests override this method to replace one.

        Args:
            config: the config that selects the plugins.
            context: the plugins' context, with the seed of the run.
            needs: whether packages that the plugins need must be installed on this machine.
        """

        def part(kind: str, section: PluginSection) -> Any:
            own = PluginContext(seed=context.seed)
            return make_plugin(ref_for(kind, section), own, needs=needs)

        return (
            part("policy_loss", config.policy_loss or PluginSection(name="ppo_clip")),
            part("loss_aggregation", config.loss_aggregation or PluginSection(name="token_mean")),
            part("rollout_correction", config.correction) if config.correction else None,
        )

    @classmethod
    def outputs(cls, config: PolicyConfig) -> tuple[OutputSpec, ...]:
        """Return `log_probs`, and `entropies` if the objective uses them."""
        loss, *_ = cls.parts(config, PluginContext(), needs=False)
        entropy = config.entropy or "entropies" in loss.requires(loss.config)
        return (OUTPUTS["log_probs"], *([OUTPUTS["entropies"]] if entropy else []))

    @classmethod
    def requires(cls, config: PolicyConfig) -> frozenset[str]:
        loss, _, correction = cls.parts(config, PluginContext(), needs=False)
        columns = {"response_mask"} | loss.requires(loss.config)
        if config.kl is not None:
            columns |= {"ref_log_probs"}
        if config.weighted:
            columns |= {"rollout_is_weights"}
        if correction is not None and correction.mode(correction.config) != "disabled":
            columns |= {"rollout_log_probs"} | correction.requires(correction.config)
        columns -= OF_THE_ENGINE
        if config.old_log_probs_from_current:
            columns -= {"old_log_probs"}
        if _makes_columns(loss):
            columns |= loss.prepares(loss.config) | {"sample_id"}
        return frozenset(columns)

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Batch:
        """Add the columns that the policy loss prepares, under the names `prepared.…`; see `Objective.prepare`.

        Raises:
            ColumnError: a column that the loss makes is not ragged over response tokens.
        """
        if not _makes_columns(self._loss):
            return mini_batch
        made = self._loss.prepare(mini_batch, reduction)
        for name, column in made.items():
            if not isinstance(column, Ragged):
                raise ColumnError(
                    f"{self._title} returned column {name!r} from `prepare` as {type(column).__name__}; expected a Ragged",
                    hint="return ragged columns from `prepare`, with one value for each response token",
                )
        return mini_batch.with_columns({PREPARED + name: made[name] for name in made})

    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        return loss_denominators(self._aggregation, mini_batch, reduction)

    def term(
        self,
        outputs: Mapping[str, Float[Tensor, "T"]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
        scalars: Mapping[str, float],
    ) -> ObjectiveTerm:
        """Compute the loss term (see `Objective.term`).

        Metrics: `actor/loss`, and `actor/pg_loss`, its first term; with a KL penalty, `actor/kl`, the mean KL per token, and
        `actor/kl_loss`, Σ KL / D without the coefficient; `actor/entropy`, the mean per token, if the objective uses it; and the metrics
        of the policy loss and of the correction.
        """
        mask: Ragged = micro_batch["response_mask"]
        mask_T = on_device(mask.values, outputs["log_probs"]).bool()
        outputs = {name: outputs[name].masked_fill(~mask_T, 0) for name in sorted(outputs)}
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
        if self.config.kl is not None:
            kl_T = estimate_kl(self.config.kl, log_probs_T, tokens.column("ref_log_probs"))
            kl_loss = aggregate(kl_T)
            loss = loss + scalars["kl_coef"] * kl_loss
            metrics["actor/kl"] = mean_metric(kl_T, mask_T, count)
            metrics["actor/kl_loss"] = loss_share(kl_loss, weight)
        if self.config.entropy:
            metrics["actor/entropy"] = mean_metric(outputs["entropies"], mask_T, count)
            if coef := scalars["entropy_coef"]:
                loss = loss - coef * aggregate(outputs["entropies"])
        metrics["actor/pg_loss"] = loss_share(pg_loss, weight)
        metrics["actor/loss"] = loss_share(loss, weight)
        return ObjectiveTerm(loss=loss, metrics=metrics, finite=all_finite(loss, outputs))

    def _policy_losses(
        self, tokens: _Tokens, outputs: Mapping[str, Float[Tensor, "T"]]
    ) -> tuple[Float[Tensor, "T"], dict[str, Metric]]:
        """Return the policy loss's token losses [T] and metrics, with the rollout correction applied."""
        inputs = LossInputs(
            log_probs_T=outputs["log_probs"],
            mask_T=tokens.mask_T,
            offsets_N1=tokens.offsets_N1,
            columns=DeclaredColumns(self._columns(tokens, outputs), self._title, self._loss),
        )
        found = self._loss.token_losses(inputs)
        check_losses(found, inputs.log_probs_T, self._title, self._loss)
        losses_T, metrics = found.losses_T, dict(found.metrics)
        if self.config.weighted:
            losses_T = losses_T * tokens.column("rollout_is_weights")
        if self._correction is not None:
            # Ranks may have different numbers of micro-batches, so a sum over ranks would deadlock.
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
        """Return the columns that the policy loss reads, from the batch, from the engine, and from the loss's own `prepare`."""
        names, current = set(self._loss_columns), {}
        if self.config.old_log_probs_from_current and "old_log_probs" in names:
            names.remove("old_log_probs")
            current["old_log_probs"] = outputs["log_probs"].detach()
        columns = {name: tokens.column(name) for name in sorted(names)} | current
        if "entropies" in self._loss_outputs:
            columns["entropies"] = outputs["entropies"]
        made = [name for name in tokens.batch.names if name.startswith(PREPARED)]
        return columns | {name.removeprefix(PREPARED): tokens.column(name) for name in made}


def _makes_columns(loss: PolicyLoss) -> bool:
    return type(loss).prepare is not PolicyLoss.prepare
