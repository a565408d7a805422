"""What holds for every policy loss."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from dovetail.interfaces.policy_loss import LossInputs, PolicyLoss, TokenLosses
from dovetail_sdk.testing.conformance.plugin import PluginConformance


class PolicyLossConformance(PluginConformance):
    """Subclass it, set `plugin`, and pytest runs the suite."""

    kind = "policy_loss"
    plugin: ClassVar[type[PolicyLoss]]
    tolerance: ClassVar[float] = 1e-5

    def inputs(
        self, seed: int, lengths: tuple[int, ...] = (3, 7, 0, 5), spread: float = 0.3
    ) -> LossInputs:
        """Random packed samples: current and other log-probabilities differ by about `spread` nats."""
        generator = torch.Generator().manual_seed(seed)
        total = sum(lengths)
        log_probs = -torch.rand(total, generator=generator) * 3 - 0.1
        columns = {
            name: torch.randn(total, generator=generator)
            if name == "advantages"
            else log_probs + spread * torch.randn(total, generator=generator)
            for name in sorted(self.plugin.requires(self.make_config()))
        }
        return LossInputs(
            log_probs_T=log_probs.requires_grad_(),
            mask_T=torch.rand(total, generator=generator) < 0.8,
            offsets_N1=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
            columns=columns,
        )

    def losses(self, inputs: LossInputs) -> TokenLosses:
        """Run the loss."""
        result: TokenLosses = self.make().token_losses(inputs)
        return result

    def gradient(self, inputs: LossInputs) -> Tensor:
        """float32 [T]: gradient of the masked sum of losses with respect to the log-probabilities."""
        total = (self.losses(inputs).losses_T * inputs.mask_T).sum()
        (gradient_T,) = torch.autograd.grad(total, inputs.log_probs_T, allow_unused=True)
        return torch.zeros_like(inputs.log_probs_T) if gradient_T is None else gradient_T

    @pytest.mark.parametrize("seed", range(3))
    def test_one_finite_loss_a_token_with_a_gradient(self, seed: int) -> None:
        inputs = self.inputs(seed)
        losses_T = self.losses(inputs).losses_T
        assert losses_T.shape == inputs.log_probs_T.shape
        assert losses_T.dtype == torch.float32
        assert torch.isfinite(losses_T[inputs.mask_T]).all()
        assert self.gradient(inputs).abs().sum() > 0

    @pytest.mark.parametrize("spread", [5.0, 50.0])
    def test_extreme_ratios_stay_finite(self, spread: float) -> None:
        inputs = self.inputs(0, spread=spread)
        assert torch.isfinite(self.losses(inputs).losses_T[inputs.mask_T]).all()
        assert torch.isfinite(self.gradient(inputs)).all()

    def test_masked_tokens_get_no_gradient(self) -> None:
        inputs = self.inputs(1)
        assert torch.equal(
            self.gradient(inputs)[~inputs.mask_T], torch.zeros(int((~inputs.mask_T).sum()))
        )

    def test_samples_do_not_see_their_batch_mates(self) -> None:
        inputs = self.inputs(2, lengths=(4, 6))
        together = self.losses(inputs).losses_T
        for part in (slice(0, 4), slice(4, 10)):
            alone = LossInputs(
                log_probs_T=inputs.log_probs_T[part],
                mask_T=inputs.mask_T[part],
                offsets_N1=torch.tensor([0, part.stop - part.start]),
                columns={name: column[part] for name, column in inputs.columns.items()},
            )
            torch.testing.assert_close(
                self.losses(alone).losses_T, together[part], atol=self.tolerance, rtol=0
            )

    def test_metrics_merge(self) -> None:
        for name, metric in self.losses(self.inputs(3)).metrics.items():
            assert math.isfinite(float(metric.merge(metric).value)), name
