"""Columns whose values have a shape, [T, K], as a loss reads them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.batch import Batch, Ragged
from dovetail.errors import NumericsError
from dovetail.interfaces.plugin import LocalReduction
from dovetail_stages.numerics.finite import require_finite
from dovetail_stages.numerics.objective_terms import token_column

MASK = Ragged.from_list([[True, False], [], [True]], np.bool_)
HEADS = MASK.with_values(np.arange(9, dtype=np.float64).reshape(3, 3))
PAIRS = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
BATCH = Batch({"response_mask": MASK, "heads": HEADS, "pairs": PAIRS, "sample_id": ["a", "b", "c"]})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("heads", [[0, 1, 2], [0, 0, 0], [6, 7, 8]]),
        ("pairs", [[1, 2], [0, 0], [5, 6]]),
    ],
)
def test_a_loss_gets_every_number_of_a_token_and_0_where_it_is_masked(name, expected) -> None:
    like_T = torch.zeros(3)
    column = token_column(BATCH, name, MASK, torch.from_numpy(MASK.values), like_T)
    assert column.dtype == torch.float32
    assert column.tolist() == expected


@pytest.mark.parametrize("name", ["heads", "pairs"])
def test_one_number_that_is_not_finite_is_found_where_the_mask_is_1(name) -> None:
    def spoilt(place: int) -> Batch:
        column = BATCH[name]
        values = np.array(column.values if isinstance(column, Ragged) else column)
        values[place, 1] = np.nan
        return BATCH.with_columns(
            {name: column.with_values(values) if isinstance(column, Ragged) else values}
        )

    require_finite(spoilt(1), [name], LocalReduction(), "a loss")  # masked, or without a token
    with pytest.raises(NumericsError) as error:
        require_finite(spoilt(2), [name], LocalReduction(), "a loss")
    assert error.value.sample_ids == ("c",)
