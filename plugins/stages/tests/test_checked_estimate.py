"""An estimator's result is checked before it is used, and the estimator can't write into the batch."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.batch import Batch, Ragged
from dovetail.errors import PluginBrokenError
from dovetail.interfaces import AdvantageEstimator, Advantages, Groups, PluginContext
from dovetail_stages.advantage import checked_estimate

MASK = Ragged.from_list([np.ones(2, np.bool_), np.ones(3, np.bool_)])
RIGHT = np.zeros(2, np.float32)


def estimate(answer):
    class Estimator(AdvantageEstimator):
        name, api, scope, level = "mine", ">=1.0,<2", "group", "sample"

        def estimate(self, columns, groups):
            return answer(columns) if callable(answer) else answer

    batch = Batch({"scores": np.ones(2, np.float32), "response_mask": MASK})
    estimator = Estimator(Estimator.Config(), PluginContext())
    return checked_estimate(estimator, batch, Groups.of(np.zeros(2, np.int64)))


def test_what_fits_passes():
    ragged = MASK.with_values(np.zeros(5, np.float32))
    assert estimate(Advantages(advantages=RIGHT)).advantages is RIGHT
    assert estimate(Advantages(advantages=ragged, metrics={"a": 1.0})).advantages is ragged


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda _: [0.0, 0.0], "returned list"),
        (lambda _: Advantages(advantages=[0.0, 0.0]), "a list"),
        (lambda _: Advantages(advantages=np.zeros((2, 1), np.float32)), "shape \\(2, 1\\)"),
        (lambda _: Advantages(advantages=np.zeros(2)), "float64"),
        (lambda _: Advantages(advantages=RIGHT, returns=np.zeros(3, np.float32)), "returns"),
        (lambda _: Advantages(advantages=RIGHT, metrics={"a": "b"}), "metric 'a'"),
        (lambda columns: columns["response_mask"].values.fill(0), "read-only"),
    ],
)
def test_what_does_not_fit_is_named(answer, said):
    with pytest.raises(PluginBrokenError, match=said):
        estimate(answer)
    assert MASK.values.all()
