"""The suite of rollout corrections."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import Tensor

from dovetail.interfaces import (
    Correction,
    CorrectionInputs,
    LocalReduction,
    Reduction,
    RolloutCorrection,
)
from dovetail.metrics import values
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.ranks import on_ranks
from dovetail_stages import resolve_metrics

LENGTHS = (3, 0, 7, 5, 1, 12)


class RolloutCorrectionConformance(PluginConformance):
    """Conformance suite for rollout corrections: subclass it and set `plugin`.

    A correction weights or rejects tokens by the ratio of the training policy to the rollout policy.
    """

    kind = "rollout_correction"
    plugin: ClassVar[type[RolloutCorrection]]
    batch_wide: ClassVar[bool] = False
    """Whether a token's correction depends on other samples, as weights normalised over the batch do."""
    tolerance: ClassVar[float] = 1e-5
    """Largest difference that counts as rounding, relative to the larger of the value and 1."""

    def inputs(
        self, seed: int, lengths: tuple[int, ...] = LENGTHS, spread: float = 0.1
    ) -> CorrectionInputs:
        """Return random packed samples of these lengths, of which the last is fully masked; by default one is empty.

        The log-probabilities of rollout and training policy differ by about `spread` nats per token.
        """
        generator = torch.Generator().manual_seed(seed)
        total = sum(lengths)
        rollout_T = -torch.rand(total, generator=generator) * 3 - 0.1
        mask_T = torch.rand(total, generator=generator) < 0.8
        mask_T[total - lengths[-1] :] = False
        return CorrectionInputs(
            train_log_probs_T=rollout_T + spread * torch.randn(total, generator=generator),
            rollout_log_probs_T=rollout_T,
            mask_T=mask_T,
            offsets_N1=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        )

    def correct(self, inputs: CorrectionInputs, reduction: Reduction | None = None) -> Correction:
        """Run the correction on packed samples; `reduction` sums over ranks, by default over a single rank."""
        return self.make().correct(inputs, reduction or LocalReduction())

    def factors(self, inputs: CorrectionInputs, reduction: Reduction | None = None) -> Tensor:
        """Return float32 [T]: the factor by which the correction multiplies each token's loss; 0 for masked and rejected tokens."""
        done = self.correct(inputs, reduction)
        factors_T = inputs.mask_T.float()
        if done.weights_T is not None:
            factors_T = factors_T * done.weights_T.masked_fill(~inputs.mask_T, 0)
        return factors_T if done.keep_T is None else factors_T.masked_fill(~done.keep_T, 0)

    def assert_close(self, got: Tensor, expected: Tensor) -> None:
        """Assert that shapes are equal and values agree within rounding; NaN equals NaN."""
        torch.testing.assert_close(
            got, expected, atol=self.tolerance, rtol=self.tolerance, equal_nan=True
        )

    def test_the_mode_is_known_and_says_what_is_required(self) -> None:
        config = self.make_config()
        mode = self.plugin.mode(config)
        assert mode in ("decoupled", "bypass", "disabled")
        assert ("rollout_log_probs" in self.plugin.requires(config)) == (mode != "disabled")
        if mode != "decoupled":
            assert not self.plugin.before_update(config), (
                "only a decoupled correction has the log-probabilities that it needs before the update"
            )

    @pytest.mark.parametrize("spread", [0.0, 0.1, 5.0, 500.0])
    def test_shapes_dtypes_and_finite_weights(self, spread: float) -> None:
        inputs = self.inputs(0, spread=spread)
        done = self.correct(inputs)
        for tensor, dtype in ((done.weights_T, torch.float32), (done.keep_T, torch.bool)):
            if tensor is not None:
                assert tensor.shape == inputs.mask_T.shape
                assert tensor.dtype == dtype
        if done.weights_T is not None:
            weights_T = done.weights_T[inputs.mask_T]
            assert torch.isfinite(weights_T).all()
            assert (weights_T >= 0).all()

    def test_weights_carry_no_gradient(self) -> None:
        inputs = self.inputs(1)
        inputs.train_log_probs_T.requires_grad_()
        done = self.correct(inputs)
        assert done.weights_T is None or not done.weights_T.requires_grad
        for metric in done.metrics.values():
            cls: Any = type(metric)
            names = [field.name for field in attrs.fields(cls)] if attrs.has(cls) else ["value"]
            figures = [getattr(metric, name) for name in names]
            assert not any(isinstance(x, Tensor) and x.requires_grad for x in figures)

    def test_equal_policies_are_left_alone(self) -> None:
        inputs = self.inputs(2, spread=0.0)
        self.assert_close(self.factors(inputs), inputs.mask_T.float())

    def test_what_is_masked_has_no_influence(self) -> None:
        inputs = self.inputs(3)
        odd = torch.tensor([math.nan, math.inf, -math.inf, 5.0]).repeat(len(inputs.mask_T))
        train_T, rollout_T = (
            torch.where(inputs.mask_T, values_T, odd[shift : shift + len(values_T)])
            for shift, values_T in enumerate((inputs.train_log_probs_T, inputs.rollout_log_probs_T))
        )
        changed = attrs.evolve(inputs, train_log_probs_T=train_T, rollout_log_probs_T=rollout_T)
        self.assert_close(self.factors(changed), self.factors(inputs))
        one, other = (values(resolve_metrics([self.correct(i).metrics])) for i in (inputs, changed))
        assert one == pytest.approx(other, nan_ok=True)

    @pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_is_rejected_or_stays_so(self, wrong: float) -> None:
        inputs = self.inputs(4)
        token = int(torch.nonzero(inputs.mask_T)[0])
        inputs.rollout_log_probs_T[token] = wrong
        done = self.correct(inputs)
        if done.weights_T is None and done.keep_T is None:
            return  # the correction does not use the ratio; the loss stops the update
        rejected = done.keep_T is not None and not done.keep_T[token]
        assert rejected or not math.isfinite(self.factors(inputs)[token])

    @pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (4,)])
    def test_nothing_to_correct_is_no_error(self, lengths: tuple[int, ...]) -> None:
        """Correct batches without an unmasked token: no sample, one or two empty samples, and a single sample that is fully masked."""
        total = sum(lengths)
        inputs = CorrectionInputs(
            train_log_probs_T=torch.zeros(total),
            rollout_log_probs_T=torch.zeros(total),
            mask_T=torch.zeros(total, dtype=torch.bool),
            offsets_N1=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        )
        assert not self.factors(inputs).any()
        resolve_metrics([self.correct(inputs).metrics])

    def test_samples_do_not_see_their_batch_mates(self) -> None:
        if self.batch_wide:
            pytest.skip("the correction normalises over the batch")
        inputs = self.inputs(5)
        alone = [self.factors(part) for part in _samples(inputs)]
        self.assert_close(torch.cat(alone), self.factors(inputs))

    def test_the_order_of_samples_does_not_matter(self) -> None:
        inputs = self.inputs(6)
        parts = _samples(inputs)
        order = list(reversed(range(len(parts))))
        turned = _joined([parts[i] for i in order])
        factors_T, bounds = self.factors(inputs), inputs.offsets_N1.tolist()
        expected = [factors_T[first:last] for first, last in pairwise(bounds)]
        self.assert_close(self.factors(turned), torch.cat([expected[i] for i in order]))

    def test_two_ranks_agree_with_one(self) -> None:
        inputs = self.inputs(7)
        parts = _samples(inputs)
        halves = [_joined(parts[:3]), _joined(parts[3:])]
        found = on_ranks(2, lambda rank, reduction: self.factors(halves[rank], reduction))
        self.assert_close(torch.cat(found), self.factors(inputs))

    def test_metrics_are_named_and_merge_over_samples(self) -> None:
        inputs = self.inputs(8)
        whole = values(resolve_metrics([self.correct(inputs).metrics]))
        assert all(name.startswith("rollout_corr/") for name in whole)
        if self.batch_wide:
            return
        parts = [self.correct(part).metrics for part in _samples(inputs)]
        merged = values(resolve_metrics(parts))
        assert merged == pytest.approx(whole, rel=1e-3, abs=1e-5)


def _samples(inputs: CorrectionInputs) -> list[CorrectionInputs]:
    bounds = inputs.offsets_N1.tolist()
    return [
        CorrectionInputs(
            train_log_probs_T=inputs.train_log_probs_T[first:last],
            rollout_log_probs_T=inputs.rollout_log_probs_T[first:last],
            mask_T=inputs.mask_T[first:last],
            offsets_N1=torch.tensor([0, last - first]),
        )
        for first, last in pairwise(bounds)
    ]


def _joined(parts: list[CorrectionInputs]) -> CorrectionInputs:
    lengths = torch.tensor([0, *(len(part.mask_T) for part in parts)])
    return CorrectionInputs(
        train_log_probs_T=torch.cat([part.train_log_probs_T for part in parts]),
        rollout_log_probs_T=torch.cat([part.rollout_log_probs_T for part in parts]),
        mask_T=torch.cat([part.mask_T for part in parts]),
        offsets_N1=lengths.cumsum(0),
    )
