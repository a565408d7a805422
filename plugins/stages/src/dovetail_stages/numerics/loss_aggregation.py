"""The loss aggregations of this package, which turn token losses into one number.

Each aggregation is Σ over samples of `total`, divided by a `denominator` over the whole mini-batch, so that no split into
micro-batches or ranks changes the loss. Only tokens with mask 1 count; a sequence without such a token is not counted.
Legend: N samples, T tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dovetail.batch import Ragged
from dovetail.interfaces import LossAggregation
from dovetail_stages.config import (
    SeqMeanTokenSumNormConfig,
)


def sum_by_sample(
    values_T: Float[Tensor, "T"], offsets_N1: Int64[Tensor, "N1"]
) -> Float[Tensor, "N1-1"]:
    """Return the sum of each sample's values, [N], in their dtype; 0 for a sample without tokens."""
    return torch.segment_reduce(values_T, "sum", offsets=offsets_N1)


def mean_by_sample(
    values_T: Float[Tensor, "T"], mask_T: Bool[Tensor, "T"], offsets_N1: Int64[Tensor, "N1"]
) -> Float[Tensor, "N1-1"]:
    """Return the mean of each sample's masked-in values, [N], in their dtype; 0 for a sample without any."""
    sums_N = sum_by_sample(values_T.where(mask_T, 0.0), offsets_N1)
    counts_N = sum_by_sample(mask_T.to(values_T.dtype), offsets_N1)
    return sums_N / counts_N.clamp(min=1)


def _sequences(response_mask: Ragged) -> float:
    return float(np.count_nonzero(response_mask.sum()))


class _SumOverTokens(LossAggregation):
    """The base of aggregations that sum over all tokens, and differ in the denominator."""

    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})

    def total(
        self,
        losses_T: Float[Tensor, "T"],
        mask_T: Bool[Tensor, "T"],
        offsets_N1: Int64[Tensor, "N1"],
    ) -> Float[Tensor, ""]:
        return losses_T.where(mask_T, 0.0).sum()


class TokenMean(_SumOverTokens):
    """Mean over all tokens of the mini-batch: long responses weigh more (DAPO, arXiv 2503.14476)."""

    name = "token_mean"
    capabilities = frozenset({"deterministic", "several_sequences"})

    def denominator(self, response_mask: Ragged) -> float:
        return float(np.count_nonzero(response_mask.values))


class TokenSum(_SumOverTokens):
    """Sum over all tokens of the mini-batch."""

    name = "token_sum"
    capabilities = frozenset({"deterministic", "several_sequences"})
    constant = True

    def denominator(self, response_mask: Ragged) -> float:
        return 1.0


class SeqMeanTokenSum(_SumOverTokens):
    """Mean over sequences of each sequence's token sum."""

    name = "seq_mean_token_sum"

    def denominator(self, response_mask: Ragged) -> float:
        return _sequences(response_mask)


class SeqMeanTokenMean(LossAggregation):
    """Mean over sequences of each sequence's token mean: every response weighs the same (GRPO, arXiv 2402.03300)."""

    name = "seq_mean_token_mean"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})

    def denominator(self, response_mask: Ragged) -> float:
        return _sequences(response_mask)

    def total(
        self,
        losses_T: Float[Tensor, "T"],
        mask_T: Bool[Tensor, "T"],
        offsets_N1: Int64[Tensor, "N1"],
    ) -> Float[Tensor, ""]:
        return mean_by_sample(losses_T, mask_T, offsets_N1).sum()


class SeqMeanTokenSumNorm(_SumOverTokens):
    """Mean over sequences of each sequence's token sum, divided by a constant (Dr. GRPO, arXiv 2503.20783)."""

    name = "seq_mean_token_sum_norm"
    Config = SeqMeanTokenSumNormConfig

    def denominator(self, response_mask: Ragged) -> float:
        return _sequences(response_mask) * float(self.config.length)
