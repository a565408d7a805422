"""The suite of loss aggregations: the loss does not depend on the division into micro-batches or the order of samples."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.batch import Ragged
from dovetail.interfaces import LossAggregation
from dovetail_sdk.testing.conformance.plugin import PluginConformance

LENGTHS = (3, 0, 7, 5, 1, 12)


class LossAggregationConformance(PluginConformance):
    """Conformance suite for loss aggregations: subclass it and set `plugin`. Legend: N samples, T tokens."""

    kind = "loss_aggregation"
    plugin: ClassVar[type[LossAggregation]]
    tolerance: ClassVar[float] = 1e-5
    """Largest relative difference that counts as rounding."""

    def samples(self, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Return random losses, float32 [T], and a mask, bool [T], per sample; one sample is empty, and one is fully masked."""
        generator = torch.Generator().manual_seed(seed)
        found = [
            (torch.randn(k, generator=generator), torch.rand(k, generator=generator) < 0.7)
            for k in LENGTHS
        ]
        found[3] = (found[3][0], torch.zeros(LENGTHS[3], dtype=torch.bool))
        return found

    def total(self, samples: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the loss sum over samples, float32 [], before division by the denominator."""
        lengths = torch.tensor([0, *(len(losses_T) for losses_T, _ in samples)])
        empty = (torch.zeros(0), torch.zeros(0, dtype=torch.bool))
        losses_T, mask_T = (torch.cat(parts) for parts in zip(*(samples or [empty]), strict=True))
        aggregation: LossAggregation = self.make()
        return aggregation.total(losses_T, mask_T, lengths.cumsum(0))

    def denominator(self, samples: list[tuple[Tensor, Tensor]]) -> float:
        """Return the denominator for samples, each given as losses [t] and mask [t]."""
        mask = Ragged.from_list([mask_T.numpy() for _, mask_T in samples], dtype=np.bool_)
        aggregation: LossAggregation = self.make()
        return aggregation.denominator(mask)

    def test_the_total_is_one_finite_number_of_float32(self) -> None:
        total = self.total(self.samples(0))
        assert (total.shape, total.dtype) == ((), torch.float32)
        assert torch.isfinite(total)

    def test_the_cut_into_micro_batches_does_not_matter(self) -> None:
        samples = self.samples(1)
        parts = [self.total(samples[a:b]) for a, b in pairwise([0, 2, 3, 6])]
        torch.testing.assert_close(
            sum(parts), self.total(samples), rtol=self.tolerance, atol=self.tolerance
        )

    def test_denominators_add_up_over_ranks_unless_they_are_constant(self) -> None:
        samples = self.samples(2)
        whole, parts = self.denominator(samples), [samples[:2], samples[2:]]
        if self.plugin.constant:
            assert [self.denominator(part) for part in parts] == [whole, whole]
        else:
            assert sum(map(self.denominator, parts)) == pytest.approx(whole)

    def test_the_order_of_samples_does_not_matter(self) -> None:
        samples = self.samples(3)
        turned = list(reversed(samples))
        torch.testing.assert_close(
            self.total(turned), self.total(samples), rtol=self.tolerance, atol=self.tolerance
        )
        assert self.denominator(turned) == pytest.approx(self.denominator(samples))

    def test_masked_tokens_have_neither_loss_nor_gradient(self) -> None:
        samples = [(losses_T.requires_grad_(), mask_T) for losses_T, mask_T in self.samples(4)]
        total = self.total(samples)
        total.backward()  # type: ignore[no-untyped-call]
        for losses_T, mask_T in samples:
            assert losses_T.grad is None or not losses_T.grad[~mask_T].any()
        odd = [(losses_T.detach().masked_fill(~m_T, 1e30), m_T) for losses_T, m_T in samples]
        torch.testing.assert_close(self.total(odd), total.detach())

    def test_nothing_to_learn_from_is_a_sum_of_0(self) -> None:
        masked = [(torch.ones(4), torch.zeros(4, dtype=torch.bool))]
        for samples in ([], [(torch.zeros(0), torch.zeros(0, dtype=torch.bool))], masked):
            assert float(self.total(samples)) == 0.0

    def test_the_loss_scales_with_the_tokens_losses(self) -> None:
        samples = self.samples(5)
        doubled = [(2 * losses_T, mask_T) for losses_T, mask_T in samples]
        torch.testing.assert_close(self.total(doubled), 2 * self.total(samples))
