"""Supervised updates: loss and gradient equal those of plain transformers, for any packing and division among ranks."""

import pytest
from plain_nll import DESCENT, assert_an_update_is_that_of_transformers, conversations

VOCABULARY = 300


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {}),
        pytest.param(1, {"budget": 4096}, marks=pytest.mark.nightly),
        pytest.param(2, {"budget": 1}, marks=pytest.mark.nightly),
        pytest.param(2, {"budget": 4096}, marks=pytest.mark.nightly),
        pytest.param(2, {"gradient_checkpointing": True}, marks=pytest.mark.nightly),
        pytest.param(1, {"budget": 1}, marks=pytest.mark.nightly),
        pytest.param(1, {"packing": "never"}, marks=pytest.mark.nightly),
    ],
)
def test_a_supervised_update_of_two_ranks_is_that_of_transformers(
    two, tiny, on_ranks, tmp_path, size, settings
):
    group = on_ranks(
        two, tiny, optim=DESCENT, grad_clip=0.0, sequence_parallel_size=size, **settings
    )
    assert_an_update_is_that_of_transformers(group, tiny, tmp_path, conversations(VOCABULARY))
