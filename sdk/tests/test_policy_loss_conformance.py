"""The suite of policy losses finds the faults that it tests for."""

import numpy as np
import pytest
import torch

from dovetail.batch import Column
from dovetail.interfaces import LossInputs, PolicyLoss, TokenLosses
from dovetail_sdk.testing.conformance import PolicyLossConformance


class Good(PolicyLoss):
    """−A exp(log π − log π_old), with the mean old log-probability of the mini-batch taken from the latter."""

    name = "good"
    api = ">=1.0,<2"

    @classmethod
    def requires(cls, config):
        return frozenset({"advantages", "old_log_probs"})

    @classmethod
    def prepares(cls, config):
        return frozenset({"old_log_probs", "response_mask"})

    def prepare(self, mini_batch, reduction):
        old, mask = mini_batch["old_log_probs"], mini_batch["response_mask"].values
        own = np.array([mask.sum(), old.values[mask].sum()], np.float64)
        count, total = reduction.sum(own)
        shifted_T = np.where(mask, old.values - total / max(count, 1), 0)
        return {"shifted": old.with_values(shifted_T.astype(np.float32))}

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        return TokenLosses(losses_T=self.losses(inputs))

    def losses(self, inputs):
        ratio_T = (inputs.log_probs_T - inputs.columns["shifted"]).clamp(-20, 20).exp()
        return -inputs.columns["advantages"] * ratio_T


class Wide(Good):
    """Weighs each token by numbers of its own, [T, 3], and of its sample, [N, 2]."""

    columns = (
        Column("kit.heads", "float32", "ragged", "heads", "kit", "response_ids", (3,)),
        Column("kit.pair", "float32", "dense", "a pair", "kit", inner=(2,)),
    )

    @classmethod
    def requires(cls, config):
        return super().requires(config) | {"kit.heads", "kit.pair"}

    def losses(self, inputs):
        heads_T3, pair_T2 = inputs.columns["kit.heads"], inputs.columns["kit.pair"]
        assert heads_T3.shape == (*inputs.log_probs_T.shape, 3)
        weight_T = heads_T3.prod(dim=1) + pair_T2[:, 0] * pair_T2[:, 1]
        return super().losses(inputs) * weight_T


class TestWide(PolicyLossConformance):
    plugin = Wide
    smooth = True


class OfItsRank(Good):
    def prepare(self, mini_batch, reduction):
        return super().prepare(mini_batch, type("Alone", (), {"sum": staticmethod(lambda x: x)}))


class OfItsMicroBatch(Good):
    def losses(self, inputs):
        return super().losses(inputs) * inputs.mask_T.sum()


class OfItsPlace(Good):
    def losses(self, inputs):
        return super().losses(inputs) * (inputs.offsets_N1[1] + 1)


class Overflowing(Good):
    def losses(self, inputs):
        return (
            -inputs.columns["advantages"] * (inputs.log_probs_T - inputs.columns["shifted"]).exp()
        )


class Narrow(Good):
    def losses(self, inputs):
        return super().losses(inputs).float()


class ReadingMasked(Good):
    def prepare(self, mini_batch, reduction):
        old = mini_batch["old_log_probs"]
        return {"shifted": old.with_values(old.values - old.values.mean())}


class Stopped(Good):
    def losses(self, inputs):
        return super().losses(inputs).detach() * inputs.log_probs_T


class Writing(Good):
    def prepare(self, mini_batch, reduction):
        made = super().prepare(mini_batch, reduction)
        mini_batch["old_log_probs"].values[:] = 0
        return made


def suite(loss):
    return type("Suite", (PolicyLossConformance,), {"plugin": loss, "smooth": True})()


CHECKS = {
    "rank": lambda s: s.test_ranks_do_not_matter(2),
    "cut": lambda s: s.test_the_cut_into_micro_batches_does_not_matter(
        [[0, 1, 2], [3, 4, 5, 6, 7]]
    ),
    "order": lambda s: s.test_the_order_of_units_does_not_matter(),
    "mates": lambda s: s.test_samples_do_not_see_their_batch_mates(),
    "extreme": lambda s: s.test_extreme_log_ratios_stay_finite(1e4),
    "dtype": lambda s: s.test_one_finite_loss_a_token_with_a_gradient(0, torch.float64),
    "masked": lambda s: s.test_what_masked_tokens_hold_does_not_matter(0.3),
    "gradient": lambda s: s.test_the_gradient_agrees_with_finite_differences(),
    "inputs": lambda s: s.test_columns_are_left_as_they_were(),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_sound_loss_passes(check):
    check(suite(Good))


@pytest.mark.parametrize(
    ("loss", "check"),
    [
        (OfItsRank, "rank"),
        (OfItsMicroBatch, "cut"),
        (OfItsPlace, "order"),
        (OfItsMicroBatch, "mates"),
        (Overflowing, "extreme"),
        (Narrow, "dtype"),
        (ReadingMasked, "masked"),
        (Stopped, "gradient"),
        (Writing, "inputs"),
    ],
)
def test_a_faulty_loss_is_caught(loss, check):
    with pytest.raises(AssertionError):
        CHECKS[check](suite(loss))
