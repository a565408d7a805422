"""NegativeLogLikelihood: the objective of supervised fine-tuning.

    L = −Σ_t m_t log π(y_t | x, y_<t) / D

where m is 1 on the trained tokens and D is the loss aggregation's denominator. By default D is the number of trained tokens in the whole
mini-batch, so that L is the cross-entropy per token (Radford et al., 2018, "Improving Language Understanding by Generative Pre-Training",
equation 1; for responses to instructions arXiv 2203.02155, section 3.5). Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
from jaxtyping import Float
from torch import Tensor

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import (
    OUTPUTS,
    Objective,
    ObjectiveTerm,
    OutputSpec,
    PluginContext,
    Reduction,
)
from dovetail.plugins import loss_aggregation
from dovetail_algorithms.config.objectives import NllConfig
from dovetail_stages import (
    all_finite,
    loss_denominators,
    loss_share,
    mean_metric,
    metric_weight,
    on_device,
)


@attrs.frozen
class Perplexity:
    """Perplexity, kept as the summed negative log-likelihood in nats and the number of tokens; NaN without tokens."""

    total: float
    tokens: float

    @property
    def value(self) -> float:
        """The perplexity, at least 1; infinite if the mean negative log-likelihood is above 709 nats."""
        mean = self.total / self.tokens if self.tokens else math.nan
        return math.exp(mean) if not mean > 709 else math.inf

    def merge(self, other: Perplexity) -> Perplexity:
        """Return the perplexity over the tokens of both perplexities."""
        return Perplexity(self.total + other.total, self.tokens + other.tokens)


class NegativeLogLikelihood(Objective):
    """Makes the tokens of the dataset's responses more likely."""

    name = "nll"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = NllConfig

    def __init__(self, config: NllConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._aggregation = loss_aggregation(config.loss_aggregation, context)

    @classmethod
    def outputs(cls, config: NllConfig) -> tuple[OutputSpec, ...]:
        return (OUTPUTS["log_probs"],)

    @classmethod
    def requires(cls, config: NllConfig) -> frozenset[str]:
        """Return `response_mask`."""
        return frozenset({"response_mask"})

    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        return loss_denominators(self._aggregation, mini_batch, reduction)

    def term(
        self,
        outputs: Mapping[str, Float[Tensor, "T"]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
        scalars: Mapping[str, float],
    ) -> ObjectiveTerm:
        """Compute the loss term (see `Objective.term`). Metrics: `actor/loss`, in nats, and `actor/perplexity`, exp of the mean −log π
        per token.
        """
        mask: Ragged = micro_batch["response_mask"]
        mask_T = on_device(mask.values, outputs["log_probs"]).bool()
        nll_T = -outputs["log_probs"].masked_fill(~mask_T, 0)
        total = self._aggregation.total(nll_T, mask_T, on_device(mask.offsets, nll_T))
        loss = total / (denominators["loss"] or 1.0)
        mean = mean_metric(nll_T, mask_T)
        return ObjectiveTerm(
            loss=loss,
            metrics={
                "actor/loss": loss_share(loss, metric_weight(micro_batch, denominators)),
                "actor/perplexity": Perplexity(mean.total, mean.weight),
            },
            finite=all_finite(loss, {"log_probs": nll_T}),
        )
