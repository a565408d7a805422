"""Scored tokens: positions in a batch, in micro-batches, and on the ranks that share a pack."""

import numpy as np
from hypothesis import given, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail_torch_engines import Samples, Scored, ScoredShare, packed_parts, rows_of, token_places

MASKS = st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=7)


def ragged(masks):
    return Ragged.from_list([np.array(mask, bool) for mask in masks], dtype=bool)


@given(MASKS)
def test_every_scored_token_is_named_once_with_its_sample_and_its_place(masks):
    scored = Scored.of(ragged(masks))
    found = [
        (int(scored.active_B[row]), int(step))
        for row, step in zip(scored.row_R, scored.step_R, strict=True)
    ]
    assert found == [(n, k) for n, mask in enumerate(masks) for k, one in enumerate(mask) if one]
    flat = np.concatenate([np.array(mask, bool) for mask in masks])
    assert scored.token_R.tolist() == np.flatnonzero(flat).tolist()
    for n, length in zip(scored.active_B, scored.lengths_B, strict=True):
        assert masks[n][length - 1]
        assert not any(masks[n][length:])


@given(MASKS, st.randoms(use_true_random=False))
def test_tokens_of_rows_in_any_order_find_their_places(masks, random):
    rows = list(range(len(masks)))
    random.shuffle(rows)
    rows = rows[: random.randint(0, len(rows))]
    whole = ragged(masks)
    numbers = whole.with_values(np.arange(len(whole.values)))
    expected = [int(k) for row in rows for k in numbers[row]]
    assert token_places(whole.offsets, rows).tolist() == expected


@given(MASKS, st.integers(1, 12), st.integers(1, 9))
def test_every_sample_is_in_one_micro_batch_and_there_are_as_many_as_asked_for(
    masks, budget, at_least
):
    mask = ragged(masks)
    ids = mask.with_values(np.zeros(len(mask.values), np.int64))
    prompts = Ragged.from_list([np.zeros(1, np.int64)] * len(masks), dtype=np.int64)
    samples = Samples.of(Batch({"prompt_ids": prompts, "response_ids": ids, "response_mask": mask}))
    assert samples.active.tolist() == [n for n, row in enumerate(masks) if any(row)]
    parts = (
        packed_parts(samples, budget, 0.0, at_least, shared=False) if samples.active.size else []
    )
    rows = rows_of(parts, samples, at_least)
    assert len(rows) >= max(1, at_least)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(masks)))


@given(st.integers(1, 5), st.integers(1, 8), st.data())
def test_the_shares_of_all_ranks_hold_every_prediction_where_they_say(ranks, tokens, data):
    source_R = np.array(data.draw(st.lists(st.integers(0, ranks * tokens - 1))), np.int64)
    shares = [ScoredShare.of(source_R, tokens, rank=r, ranks=ranks) for r in range(ranks)]
    # Every rank has the same number of predictions, at least one.
    assert len({len(share.source_M) for share in shares}) == 1
    assert len(shares[0].source_M) >= 1
    held = np.concatenate([share.source_M + r * tokens for r, share in enumerate(shares)])
    values = np.concatenate([share.filled(source_R * 2, -1) for share in shares])
    for share in shares:
        np.testing.assert_array_equal(held[share.place_R], source_R)
        np.testing.assert_array_equal(values[share.place_R], source_R * 2)
