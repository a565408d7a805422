"""Division into micro-batches: every sample once, within the budget, with prompts shared if that saves work."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail_train_fsdp2.layout import Padded, Shared, lay_out
from dovetail_train_fsdp2.packing import Means, cut

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


def fed_tokens(fed):
    """How many tokens the model computes, padding included."""
    if isinstance(fed, Padded):
        return fed.ids_BL.size
    return fed.prompts_GP.size + fed.ids_BL.size if isinstance(fed, Shared) else len(fed.ids_F)


def fed_ids(fed):
    """What the model is given, in the order in which a layout's sources count it."""
    if isinstance(fed, Padded):
        return fed.ids_BL.reshape(-1)
    if isinstance(fed, Shared):
        return np.concatenate([fed.prompts_GP.reshape(-1), fed.ids_BL.reshape(-1)])
    return fed.ids_F


ways = st.builds(
    Means,
    packing=st.sampled_from(["auto", "always", "never"]),
    share=st.sampled_from(["auto", "always", "never"]),
    share_packed=st.sampled_from(["auto", "always", "never"]),
    device=st.sampled_from(["cpu", "cuda"]),
    quadratic=st.sampled_from([0.0, 0.1]),
)


@given(samples, st.integers(1, 60), ways, st.integers(1, 5))
def test_every_sample_is_in_one_micro_batch_and_the_budget_holds(rows, budget, means, at_least):
    batch = batch_of(rows)
    cuts = cut(batch, budget, means, at_least)
    assert len(cuts) >= at_least
    assert sorted(np.concatenate([part.rows_B for part in cuts])) == list(range(len(rows)))
    for part in cuts:
        assert not (part.packed and means.packing == "never")
        assert part.packed or means.packing != "always"
        micro_batch = batch.take(part.rows_B)
        fed = lay_out(micro_batch, shared=part.shared, packed=part.packed).fed
        scored = micro_batch["response_mask"].sum() > 0
        assert fed_tokens(fed) <= budget or scored.sum() == 1


@given(samples, st.integers(1, 60), ways, st.integers(1, 5), st.integers(1, 6), st.data())
def test_a_unit_is_in_one_micro_batch(rows, budget, means, at_least, units, data):
    ids = data.draw(st.lists(st.integers(1, units), min_size=len(rows), max_size=len(rows)))
    batch = batch_of(rows).with_columns({"pair_id": np.array(ids)})
    cuts = cut(batch, budget, means, at_least, "pair")
    assert len(cuts) >= at_least
    assert sorted(np.concatenate([part.rows_B for part in cuts])) == list(range(len(rows)))
    homes = [{ids[row] for row in part.rows_B} for part in cuts]
    assert sum(map(len, homes)) == len(set(ids))
    for part, home in zip(cuts, homes, strict=True):
        micro_batch = batch.take(part.rows_B)
        fed = lay_out(micro_batch, shared=part.shared, packed=part.packed).fed
        scored = micro_batch["response_mask"].sum() > 0
        assert fed_tokens(fed) <= budget or len({ids[r] for r in part.rows_B[scored]}) == 1
        assert not part.shared
        assert home or not len(part.rows_B)


@given(samples, st.integers(1, 60), ways, st.integers(1, 5))
def test_ranks_can_agree_on_a_number_of_micro_batches(rows, budget, means, more):
    batch = batch_of(rows)
    alone = len(cut(batch, budget, means))
    assert len(cut(batch, budget, means, alone + more)) == alone + more


@given(samples, st.booleans(), st.booleans())
def test_each_scored_token_is_predicted_from_the_tokens_before_it(rows, shared, packed):
    batch = batch_of(rows)
    layout = lay_out(batch, shared=shared, packed=packed)
    mask = batch["response_mask"]
    assert layout.tokens == len(mask.values)
    assert layout.fed.tokens == fed_tokens(layout.fed)
    assert layout.padding == np.count_nonzero(fed_ids(layout.fed) == 0)
    np.testing.assert_array_equal(layout.token_R, np.flatnonzero(mask.values))
    np.testing.assert_array_equal(layout.targets_R, batch["response_ids"].values[mask.values])
    whole = [
        np.concatenate([p, r])
        for p, r in zip(batch["prompt_ids"], batch["response_ids"], strict=True)
    ]
    row = mask.row_index[layout.token_R]
    before = layout.token_R - mask.offsets[row] + batch["prompt_ids"].lengths[row] - 1
    expected = [whole[i][j] for i, j in zip(row, before, strict=True)]
    np.testing.assert_array_equal(
        fed_ids(layout.fed)[layout.source_R], np.array(expected, np.int64)
    )
    if packed:
        np.testing.assert_array_equal(layout.fed.positions_F[layout.source_R], before)


@given(samples, st.booleans())
def test_a_pack_holds_each_sequence_whole_and_nothing_else(rows, shared):
    fed = lay_out(batch_of(rows), shared=shared, packed=True).fed
    assert len(fed.ids_F) == len(fed.positions_F) == fed.lengths_S.sum()
    assert (fed.lengths_S > 0).all()
    starts = np.cumsum(fed.lengths_S) - fed.lengths_S
    steps = np.diff(fed.positions_F, prepend=0)
    steps[starts] = 1
    assert (steps == 1).all()
    prompts = 0 if fed.responses_G is None else len(fed.responses_G)
    assert (fed.positions_F[starts[: prompts or None]] == 0).all()
    if shared:
        of_prompts = fed.lengths_S[:prompts].sum()
        assert fed.responses_G.sum() == len(fed.ids_F) - of_prompts
        # The positions of a prompt's responses begin at the prompt's length.
        begins, at = fed.positions_F[starts[prompts:]], starts[prompts:] - of_prompts
        owner = np.searchsorted(np.cumsum(fed.responses_G), at, side="right")
        np.testing.assert_array_equal(begins, fed.lengths_S[:prompts][owner])


def test_shared_prompts_appear_once():
    batch = batch_of([(2, [True] * 4)] * 8 + [(0, [True] * 4)])
    (part,) = cut(batch, 1000, Means(share="auto"))
    assert part.shared
    fed = lay_out(batch.take(part.rows_B), shared=True).fed
    assert fed.prompts_GP.shape == (2, 7)
    assert fed.ids_BL.shape == (9, 3)
    (part,) = cut(batch, 1000, Means(packing="auto", share_packed="auto"))
    assert part.shared
    assert part.packed
    packed = lay_out(batch.take(part.rows_B), shared=True, packed=True).fed
    assert len(packed.ids_F) == 7 + 1 + 9 * 3
    assert sorted(packed.responses_G) == [3, 24]


def test_auto_shares_only_where_it_saves_work():
    alone = batch_of([(0, [True] * 8), (1, [True] * 8), (2, [True] * 8)])
    assert not cut(alone, 1000, Means(share="auto"))[0].shared
    assert cut(alone, 1000, Means(share="always"))[0].shared
    assert not cut(alone, 1000, Means(packing="auto", share_packed="auto"))[0].shared
    assert cut(alone, 1000, Means(packing="auto", share_packed="always"))[0].shared


@pytest.mark.parametrize(
    ("length", "device", "shared"),
    [(40, "cpu", False), (20, "cpu", True), (20, "cuda", False), (5, "cuda", True)],
)
def test_auto_weighs_what_sharing_costs_on_the_device(length, device, shared):
    # Sharing reduces 4 · (7 + length − 1) tokens to 7 + 4 · (length − 1): 89%, 80% and 52%.
    batch = batch_of([(2, [True] * length)] * 4)
    assert cut(batch, 1000, Means(share="auto", device=device))[0].shared is shared
    # Equal lengths need no padding, so that packing is compared by the same numbers.
    part = cut(batch, 1000, Means(packing="auto", share="auto", device=device))[0]
    assert part.shared is shared
    assert part.packed is not shared


def skewed(count=100):
    rng = np.random.default_rng(0)
    return batch_of([(0, [True] * int(n)) for n in rng.integers(1, 200, count)])


def test_micro_batches_are_balanced_and_of_similar_lengths():
    batch = skewed()
    cuts = cut(batch, 2000, Means())
    sizes = [fed_tokens(lay_out(batch.take(part.rows_B)).fed) for part in cuts]
    tokens = batch["response_ids"].lengths.sum()
    assert max(sizes) <= 2000
    assert min(sizes) > 0.6 * max(sizes)
    assert sum(sizes) < 1.2 * tokens
    assert len(cuts) <= np.ceil(sum(sizes) / 2000) + 1


@pytest.mark.parametrize("quadratic", [0.0, 0.02])
@pytest.mark.parametrize("at_least", [1, 9])
def test_packs_are_full_and_of_one_cost(quadratic, at_least):
    batch = skewed()
    cuts = cut(batch, 2000, Means(packing="always", quadratic=quadratic), at_least)
    lengths = [batch["response_ids"].lengths[part.rows_B] for part in cuts]
    costs = [(n + quadratic * n**2).sum() for n in lengths]
    assert max(costs) < 1.02 * min(costs)
    assert costs == sorted(costs, reverse=True)
    assert len(cuts) <= max(at_least, np.ceil(batch["response_ids"].lengths.sum() / 2000) + 1)


def test_a_prompt_with_more_responses_than_a_micro_batch_holds_is_repeated():
    batch = batch_of([(2, [True] * 21)] * 10)
    cuts = cut(batch, 100, Means(packing="always", share_packed="always"))
    sizes = [fed_tokens(lay_out(batch.take(p.rows_B), shared=True, packed=True).fed) for p in cuts]
    # Each micro-batch has the prompt's 7 tokens, and 4, 3 or 3 responses of 20 tokens.
    assert sorted(sizes) == [67, 67, 87]


def test_many_samples_are_cut_in_no_time():
    rng = np.random.default_rng(0)
    batch = batch_of(
        [
            (int(p), [True] * int(n))
            for p, n in zip(rng.integers(0, 4, 4000), rng.integers(50, 90, 4000), strict=True)
        ]
    )
    cuts = cut(batch, 150, Means(packing="always"))
    assert len(cuts) < 4000
