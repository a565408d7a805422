"""Shape annotations: tests refuse arguments that contradict them, and light modules import nothing for them."""

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from dovetail.interfaces import (
    Advantages,
    Groups,
    LossInputs,
    ObjectiveTerm,
    PluginContext,
    TokenLosses,
)
from dovetail.sections import PluginSection
from dovetail_sdk.testing.shapes import checked
from dovetail_stages import estimate_kl, sum_by_sample, whiten
from dovetail_stages.numerics.kl import ESTIMATORS
from dovetail_stages.numerics.loss_aggregation import TokenMean
from dovetail_stages.numerics.masked import weighted_moments

ONE, FOUR, SQUARE = torch.zeros(1), torch.zeros(4), torch.zeros(2, 2)
ALL = torch.ones(4, dtype=torch.bool)
OFFSETS = torch.tensor([0, 2, 4])


def loss_inputs(**changes):
    given = {"log_probs_T": FOUR, "mask_T": ALL, "offsets_N1": OFFSETS, "columns": {"a": FOUR}}
    return LossInputs(**{**given, **changes})


# Unchecked, all of these calls would run, for example by broadcasting, and give wrong numbers.
WRONG = {
    "two lengths": lambda: estimate_kl("k1", FOUR, ONE),
    "two axes": lambda: ESTIMATORS["k3+"](SQUARE),
    "an integer": lambda: ESTIMATORS["k2"](OFFSETS),
    "a two-dimensional array": lambda: weighted_moments(np.ones((2, 2)), np.ones((2, 2), bool)),
    "a mask of texts": lambda: whiten(np.ones(2), np.array(["0", "1"])),
    "narrow offsets": lambda: sum_by_sample(FOUR, OFFSETS.int()),
    "a mask that broadcasts": lambda: TokenMean(PluginSection(), PluginContext()).total(
        FOUR, ALL[:1], OFFSETS
    ),
    "a field": lambda: loss_inputs(mask_T=ALL[:1]),
    "a column": lambda: loss_inputs(columns={"a": ONE}),
    "losses": lambda: TokenLosses(losses_T=SQUARE),
    "a loss": lambda: ObjectiveTerm(loss=ONE, metrics={}, finite=torch.tensor(True)),
    "wide advantages": lambda: Advantages(advantages=np.zeros(4)),
    "groups in a square": lambda: Groups(np.zeros((2, 2), np.int64), 1),
    "values in a square": lambda: Groups.of(np.zeros((2, 2))),
    "values of a method": lambda: Groups.of(np.zeros(4)).mean_N(np.array(["a"] * 4)),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_wrong_shape_or_dtype_is_refused(call):
    with pytest.raises(TypeCheckError):
        call()


def test_right_ones_pass():
    assert loss_inputs().sample_T.tolist() == [0, 0, 1, 1]
    assert Groups.of(np.array(["b", "a", "b"])).sizes_G.tolist() == [2, 1]


def test_checks_end_with_their_context():
    class Plain:
        def double(self, values: "np.ndarray") -> "int":
            return values * 2

    before = Plain.__dict__["double"], dict(Plain.double.__annotations__)
    with checked(Plain), pytest.raises(TypeCheckError):
        Plain().double(np.ones(1))
    assert (Plain.__dict__["double"], Plain.double.__annotations__) == before
    assert Plain().double(np.ones(1)) == 2
