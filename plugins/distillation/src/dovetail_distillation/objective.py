"""Distill: the objective of a student.

    L = c Σ_t m_t D(P_t, Q_t) / N  +  L_plus

with teacher P and student Q. D is a divergence of `divergences`, or an estimate of KL(Q ‖ P) from the sampled token
(`dovetail_stages.numerics.estimate_kl`). N is the loss aggregation's denominator, by default the number of the mini-batch's tokens.
`min_log_prob` bounds log P and log Q, and `max_divergence` bounds D.
Legend: T response tokens, packed end to end, K words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import attrs
from jaxtyping import Float
from torch import Tensor

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError, ConfigError
from dovetail.interfaces import (
    OUTPUTS,
    Objective,
    ObjectiveSpec,
    ObjectiveTerm,
    OutputSpec,
    PluginContext,
    PluginRef,
    Reduction,
)
from dovetail.metrics import Metric
from dovetail.plugins import loss_aggregation, make_plugin, objective_spec
from dovetail_distillation.columns import LOG_PROBS, TOP_IDS, TOP_LOG_PROBS
from dovetail_distillation.config import DistillConfig
from dovetail_distillation.divergences import DIVERGENCES, divergence, events
from dovetail_stages import (
    all_finite,
    estimate_kl,
    loss_denominators,
    loss_share,
    mean_metric,
    metric_weight,
    on_device,
    token_column,
)

PLUS = "plus."
"""Prefix that separates the denominators of the objective in `plus` from this objective's own."""


class Distill(Objective):
    """Makes a student's distribution match its teacher's, on its own samples or on a dataset's examples."""

    name = "distill"
    api = ">=1.1,<2"
    capabilities = frozenset({"deterministic"})
    Config = DistillConfig

    def __init__(self, config: DistillConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._aggregation = loss_aggregation(config.loss_aggregation, context)
        self._spec = _plus(config)
        own = PluginContext(seed=context.seed)
        self._plus = (
            None if self._spec is None else cast("Objective", make_plugin(self._spec.plugin, own))
        )

    @classmethod
    def spec(cls, plugin: PluginRef, scalars: Mapping[str, float]) -> ObjectiveSpec:
        """Return the spec as `Objective` does. If the config adds a second objective (`plus`), the spec also has that objective's
        columns, and its unit: the samples that share a loss, such as a pair.
        """
        own, plus = super().spec(plugin, scalars), _plus(plugin.config)
        if plus is None:
            return own
        return attrs.evolve(own, unit=plus.unit, requires=own.requires | plus.requires)

    @classmethod
    def outputs(cls, config: DistillConfig) -> tuple[OutputSpec, ...]:
        """Return `log_probs_at` of the teacher's most likely words, or `log_probs` if the divergence is of sampled tokens alone; and the
        outputs of the objective in `plus`.

        Raises:
            ConfigError: the objective in `plus` computes `log_probs_at` of other words.
        """
        own = OUTPUTS["log_probs"]
        if config.divergence in DIVERGENCES:
            own = OUTPUTS["log_probs_at"].sized(config.top_k, reads={TOP_IDS})
        plus = _plus(config)
        found = {own.name: own} | {o.name: o for o in (plus.outputs if plus is not None else ())}
        if found[own.name] != own:
            raise ConfigError(
                f"objective 'distill' can't be combined with `plus` {plus.plugin.name if plus else ''!r}: the two compute {own.name!r} at different token ids",
                hint="leave `plus` out, or set `divergence` to one that compares only the sampled token, such as k2",
            )
        return tuple(found.values())

    @classmethod
    def requires(cls, config: DistillConfig) -> frozenset[str]:
        """Return `response_mask`, and `teacher_top_log_probs` or, for divergences of the sampled token alone, `teacher_log_probs`."""
        by_words = config.divergence in DIVERGENCES
        return frozenset({"response_mask", TOP_LOG_PROBS if by_words else LOG_PROBS})

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Batch:
        return mini_batch if self._plus is None else self._plus.prepare(mini_batch, reduction)

    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        own = dict(loss_denominators(self._aggregation, mini_batch, reduction))
        if self._plus is None:
            return own
        plus = self._plus.denominators(mini_batch, reduction)
        return own | {PLUS + name: value for name, value in plus.items()}

    def term(
        self,
        outputs: Mapping[str, Float[Tensor, "T ..."]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
        scalars: Mapping[str, float],
    ) -> ObjectiveTerm:
        """Compute the loss term (see `Objective.term`). Metrics: `actor/loss`, `actor/divergence`, in nats per token, `actor/distill_loss`,
        `actor/teacher_mass`, the total probability that the teacher gives to its most likely words, and the metrics of the objective in
        `plus`.
        """
        by_words = self.config.divergence in DIVERGENCES
        student = outputs["log_probs_at" if by_words else "log_probs"]
        mask: Ragged = micro_batch["response_mask"]
        mask_T = on_device(mask.values, student).bool()
        student = student.masked_fill(~mask_T[:, None] if by_words else ~mask_T, 0)
        metrics: dict[str, Metric] = {}
        if by_words:
            teacher_TK = token_column(micro_batch, TOP_LOG_PROBS, mask, mask_T, student[:, 0])
            divergences_T = self._by_words(self._least(teacher_TK), self._least(student))
            divergences_T = self._bounded(divergences_T).masked_fill(~mask_T, 0)
            metrics["actor/teacher_mass"] = mean_metric(teacher_TK.exp().sum(-1), mask_T)
        else:
            teacher_T = token_column(micro_batch, LOG_PROBS, mask, mask_T, student)
            estimates_T = estimate_kl(
                self.config.divergence, self._least(student), self._least(teacher_T)
            )
            divergences_T = self._bounded(estimates_T)
        total = self._aggregation.total(divergences_T, mask_T, on_device(mask.offsets, student))
        loss = own = self.config.coef * total / (denominators["loss"] or 1.0)
        finite = all_finite(loss, {"student": student.sum(-1) if by_words else student})
        if self._plus is not None and self._spec is not None:
            parts = {
                name.removeprefix(PLUS): value
                for name, value in denominators.items()
                if name.startswith(PLUS)
            }
            theirs = {name: outputs[name] for name in self._spec.output_names}
            plus = self._plus.term(theirs, micro_batch, parts, self._spec.scalars)
            metrics |= plus.metrics
            loss, finite = loss + plus.loss, finite & plus.finite
        weight = metric_weight(micro_batch, denominators)
        metrics["actor/divergence"] = mean_metric(divergences_T, mask_T)
        metrics["actor/distill_loss"] = loss_share(own, weight)
        metrics["actor/loss"] = loss_share(loss, weight)
        return ObjectiveTerm(loss=loss, metrics=metrics, finite=finite)

    def _least(self, log_probs: Float[Tensor, "T ..."]) -> Float[Tensor, "T ..."]:
        least = self.config.min_log_prob
        return log_probs if least is None else log_probs.clamp(min=least)

    def _bounded(self, divergences_T: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
        most = self.config.max_divergence
        return divergences_T if most is None else divergences_T.clamp(-most, most)

    def _by_words(
        self, teacher_TK: Float[Tensor, "T K"], student_TK: Float[Tensor, "T K"]
    ) -> Float[Tensor, "T"]:
        if teacher_TK.shape != student_TK.shape:
            raise ColumnError(
                f"column {TOP_LOG_PROBS} has shape {list(teacher_TK.shape)}; expected {list(student_TK.shape)} (top_k={self.config.top_k})"
            )
        tail = self.config.tail
        both = events(teacher_TK, tail), events(student_TK, tail)
        return divergence(self.config.divergence, *both, beta=self.config.beta)


def _plus(config: DistillConfig) -> ObjectiveSpec | None:
    return None if config.plus is None else objective_spec(config.plus)
