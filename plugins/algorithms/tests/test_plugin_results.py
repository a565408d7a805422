"""Losses and corrections that break their contract: one error that names the plugin, the fault and the fix."""

import pickle

import numpy as np
import pytest
import torch

from dovetail.batch import Batch, Ragged
from dovetail.errors import PluginBrokenError
from dovetail.interfaces import (
    Correction,
    LocalReduction,
    PluginContext,
    PolicyLoss,
    RolloutCorrection,
    TokenLosses,
)
from dovetail_algorithms.config.objectives import PolicyConfig
from dovetail_algorithms.objectives.policy import PolicyObjective
from dovetail_stages.numerics.loss_aggregation import TokenMean
from dovetail_stages.numerics.rollout_correction import correct_batch

OFFSETS = np.array([0, 2, 5])
LOG_PROBS_T = torch.full((5,), -1.0, requires_grad=True)


@pytest.fixture(scope="module", autouse=True)
def interface_shapes():
    """Turn off the shape checks of other tests, so that bad results reach the objective's own checks."""


class Returning(PolicyLoss):
    """Returns what a test gives it."""

    name = "returning"
    api = ">=1.0,<2"
    returned = staticmethod(lambda inputs: None)

    @classmethod
    def requires(cls, config):
        return frozenset({"old_log_probs"})

    def token_losses(self, inputs):
        return self.returned(inputs)


class Correcting(RolloutCorrection):
    """Returns what a test gives it."""

    name = "correcting"
    api = ">=1.0,<2"
    returned = staticmethod(lambda inputs: None)

    @classmethod
    def mode(cls, config):
        return "decoupled"

    def correct(self, inputs, reduction):
        return self.returned(inputs)


def batch():
    column = Ragged(np.full(5, -1, np.float32), OFFSETS)
    return Batch(
        {
            "sample_id": ["a", "b"],
            "response_mask": Ragged(np.ones(5, bool), OFFSETS),
            "old_log_probs": column,
            "rollout_log_probs": column,
            "advantages": np.ones(2, np.float32),
        }
    )


def of(cls, returned):
    made = cls(cls.Config(), PluginContext())
    made.returned = returned
    return made


def run(returned=lambda inputs: TokenLosses(losses_T=-inputs.log_probs_T), correction=None):
    class Made(PolicyObjective):
        @classmethod
        def parts(cls, config, context, needs=True):
            aggregation = TokenMean(TokenMean.Config(), PluginContext())
            corrects = None if correction is None else of(Correcting, correction)
            return of(Returning, returned), aggregation, corrects

    goal = Made(PolicyConfig(name="policy"), PluginContext())
    denominators = goal.denominators(batch(), LocalReduction())
    return goal.term({"log_probs": LOG_PROBS_T}, batch(), denominators, goal.scalars)


def test_a_column_that_was_not_declared_is_named_with_the_line_that_reads_it():
    def reads(inputs):
        return inputs.columns["advantages"]

    with pytest.raises(PluginBrokenError) as caught:
        run(reads)
    line = reads.__code__.co_firstlineno + 1
    assert caught.value.message == (
        f"policy_loss/returning (Returning of {__file__}) ({__file__}:{line}) reads the column 'advantages', which its requires() does not "
        "name; it can read old_log_probs"
    )
    assert "requires()" in caught.value.hint
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_column_that_may_be_missing_can_still_be_asked_for():
    def asks(inputs):
        assert "advantages" not in inputs.columns
        assert inputs.columns.get("advantages") is None
        return TokenLosses(losses_T=-inputs.columns["old_log_probs"] * inputs.log_probs_T)

    assert run(asks).loss.item() == -1


@pytest.mark.parametrize(
    ("returned", "words", "fix"),
    [
        (lambda i: None, "returned None", "return TokenLosses(losses_T="),
        (lambda i: -i.log_probs_T, "returned a float32 tensor of shape [5], not TokenLosses", "return TokenLosses("),
        (lambda i: TokenLosses(losses_T=-i.log_probs_T[:2]), "is a float32 tensor of shape [2]", "a float32 tensor of shape [5]"),
        (lambda i: TokenLosses(losses_T=-i.log_probs_T.double()), "is a float64 tensor of shape [5]", "a float32 tensor"),
        (lambda i: TokenLosses(losses_T=-i.log_probs_T, metrics={"actor/x": 1.0}), "the metric 'actor/x'", "dovetail.metrics"),
    ],
)  # fmt: skip
def test_a_loss_returns_one_loss_a_token(returned, words, fix):
    with pytest.raises(PluginBrokenError) as caught:
        run(returned)
    assert "policy_loss/returning" in caught.value.message
    assert f"({__file__}:{Returning.token_losses.__code__.co_firstlineno})" in caught.value.message
    assert words in caught.value.message
    assert fix in caught.value.hint


@pytest.mark.parametrize(
    ("returned", "words", "fix"),
    [
        (lambda i: i.mask_T, "tensor of shape [5], not Correction", "return Correction("),
        (lambda i: Correction(weights_T=torch.ones(2)), "weights_T of rollout_correction/correcting", "shape [5]"),
        (lambda i: Correction(keep_T=torch.ones(5)), "is a float32 tensor of shape [5]", "tensor of shape [5]"),
        (lambda i: Correction(metrics={"rollout_corr/x": 1.0}), "the metric 'rollout_corr/x'", "mean_metric"),
    ],
)  # fmt: skip
def test_a_correction_returns_weights_and_what_to_keep(returned, words, fix):
    with pytest.raises(PluginBrokenError) as within:
        run(correction=returned)
    with pytest.raises(PluginBrokenError) as before:
        correct_batch(of(Correcting, returned), batch())
    for caught in (within, before):
        assert "rollout_correction/correcting" in caught.value.message
        assert words in caught.value.message
        assert fix in caught.value.hint


def test_what_keeps_the_contract_passes():
    kept = run(correction=lambda i: Correction(weights_T=torch.full((5,), 2.0), keep_T=i.mask_T))
    assert kept.loss.item() == 2
