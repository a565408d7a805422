"""Cutting into micro-batches: every sample once, within the budget, prompts shared where that saves work."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.batch import Batch, Ragged
from dovetail_train_fsdp2.packing import cut, lay_out

samples = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.booleans(), max_size=9)), min_size=1, max_size=14
)
PROMPTS = [[1], [2, 3, 4], [5] * 7, [6, 7]]


def batch_of(rows):
    mask = Ragged.from_list([mask for _, mask in rows], dtype=bool)
    return Batch(
        {
            "prompt_ids": Ragged.from_list([PROMPTS[p] for p, _ in rows], dtype=np.int64),
            "response_ids": mask.with_values(np.arange(10, 10 + len(mask.values))),
            "response_mask": mask,
            "temperature": np.ones(len(rows), np.float32),
        }
    )


@given(samples, st.integers(1, 60), st.sampled_from(["auto", "always", "never"]))
def test_every_sample_is_in_one_micro_batch_and_the_budget_holds(rows, budget, share):
    batch = batch_of(rows)
    cuts = cut(batch, budget, share)
    assert sorted(np.concatenate([part.rows_B for part in cuts])) == list(range(len(rows)))
    for part in cuts:
        layout = lay_out(batch.take(part.rows_B), shared=part.shared)
        padded = layout.ids_BL.size + (0 if layout.prompts_GP is None else layout.prompts_GP.size)
        assert padded <= budget or len(layout.ids_BL) == 1


@given(samples, st.booleans())
def test_each_scored_token_is_predicted_from_the_tokens_before_it(rows, shared):
    batch = batch_of(rows)
    layout = lay_out(batch, shared=shared)
    mask = batch["response_mask"]
    assert layout.tokens == len(mask.values)
    np.testing.assert_array_equal(layout.token_R, np.flatnonzero(mask.values))
    np.testing.assert_array_equal(layout.targets_R, batch["response_ids"].values[mask.values])
    flat = layout.ids_BL.reshape(-1)
    if layout.prompts_GP is not None:
        flat = np.concatenate([layout.prompts_GP.reshape(-1), flat])
    whole = [
        np.concatenate([p, r])
        for p, r in zip(batch["prompt_ids"], batch["response_ids"], strict=True)
    ]
    row = mask.row_index[layout.token_R]
    before = layout.token_R - mask.offsets[row] + batch["prompt_ids"].lengths[row] - 1
    expected = [whole[i][j] for i, j in zip(row, before, strict=True)]
    np.testing.assert_array_equal(flat[layout.source_R], np.array(expected, np.int64))


def test_shared_prompts_appear_once():
    batch = batch_of([(2, [True] * 4)] * 8 + [(0, [True] * 4)])
    (part,) = cut(batch, 1000, "auto")
    assert part.shared
    layout = lay_out(batch.take(part.rows_B), shared=True)
    assert layout.prompts_GP.shape == (2, 7)
    assert layout.ids_BL.shape == (9, 3)


def test_auto_shares_only_where_it_saves_work():
    alone = batch_of([(0, [True] * 8), (1, [True] * 8), (2, [True] * 8)])
    assert not cut(alone, 1000, "auto")[0].shared
    assert cut(alone, 1000, "always")[0].shared


@pytest.mark.parametrize(
    ("length", "device", "shared"),
    [(40, "cpu", False), (20, "cpu", True), (20, "cuda", False), (5, "cuda", True)],
)
def test_auto_weighs_what_sharing_costs_on_the_device(length, device, shared):
    # Of 4 · (7 + length − 1) tokens, 7 + 4 · (length − 1) are left: 89%, 80% and 52%.
    batch = batch_of([(2, [True] * length)] * 4)
    assert cut(batch, 1000, "auto", device)[0].shared is shared


def test_micro_batches_are_balanced_and_of_similar_lengths():
    rng = np.random.default_rng(0)
    batch = batch_of([(0, [True] * int(n)) for n in rng.integers(1, 200, 100)])
    cuts = cut(batch, 2000, "never")
    sizes = [lay_out(batch.take(part.rows_B), shared=False).ids_BL.size for part in cuts]
    tokens = batch["response_ids"].lengths.sum()
    assert max(sizes) <= 2000
    assert min(sizes) > 0.6 * max(sizes)
    assert sum(sizes) < 1.2 * tokens
    assert len(cuts) <= np.ceil(sum(sizes) / 2000) + 1
