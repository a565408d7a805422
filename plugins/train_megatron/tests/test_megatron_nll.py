"""Supervised updates: loss and gradient equal those of plain transformers in every layout."""

import pytest
from plain_nll import DESCENT, assert_an_update_is_that_of_transformers, conversations

VOCABULARY = 300


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"context_parallel_size": 2},
    ],
    ids=["dp", "tp", "pp", "cp"],
)
@pytest.mark.parametrize("budget", [1, 4096])
def test_a_supervised_update_is_that_of_transformers(two, tiny, on_ranks, tmp_path, layout, budget):
    group = on_ranks(two, tiny, optim=DESCENT, budget=budget, grad_clip=0.0, **layout)
    assert_an_update_is_that_of_transformers(group, tiny, tmp_path, conversations(VOCABULARY))
