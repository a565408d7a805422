"""The tokens that Clip-Cov and KL-Cov choose: compared with a slow loop, and independent of ranks and order."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces import LocalReduction, PluginContext
from dovetail_algorithms.config.losses import ClipCovConfig, KlCovConfig
from dovetail_algorithms.losses.clip_cov import ClipCovLoss
from dovetail_algorithms.losses.kl_cov import KlCovLoss
from dovetail_algorithms.losses.selection import largest, ordered_keys, token_hashes
from dovetail_sdk.testing.ranks import on_ranks

floats = st.floats(-5, 5, width=32)
rows = st.lists(
    st.tuples(floats, st.lists(st.tuples(floats, st.booleans()), max_size=6)),
    min_size=1,
    max_size=8,
)


def batch_of(rows, name="s"):
    """Samples of (advantage, [(old log-probability, mask)])."""
    return Batch(
        {
            "sample_id": [f"{name}{index}" for index in range(len(rows))],
            "advantages": np.array([advantage for advantage, _ in rows], np.float32),
            "old_log_probs": Ragged.from_list(
                [[value for value, _ in row] for _, row in rows], dtype=np.float32
            ),
            "response_mask": Ragged.from_list(
                [[kept for _, kept in row] for _, row in rows], dtype=np.bool_
            ),
        }
    )


def random_batch(samples=40, seed=0):
    rng = np.random.default_rng(seed)
    return batch_of(
        [
            (rng.normal(), [(rng.normal(), rng.random() < 0.8) for _ in range(rng.integers(0, 40))])
            for _ in range(samples)
        ]
    )


def chosen(plugin, batch, reduction=None, seed=0, **settings):
    """Names and positions of the tokens that `prepare` chooses."""
    loss = plugin(plugin.Config(**settings), PluginContext(seed=seed))
    (column,) = loss.prepare(batch, reduction or LocalReduction()).values()
    assert column.dtype == np.float32
    np.testing.assert_array_equal(column.offsets, batch["response_mask"].offsets)
    return {
        (name, place)
        for name, row in zip(batch["sample_id"], column, strict=True)
        for place in np.flatnonzero(row).tolist()
    }


def covariance(rows):
    """Return the covariances of the tokens with mask 1, by sample name and position."""
    kept = [
        (f"s{index}", place, advantage, value)
        for index, (advantage, row) in enumerate(rows)
        for place, (value, mask) in enumerate(row)
        if mask
    ]
    count = len(kept) or 1
    mean_a = math.fsum(advantage for *_, advantage, _ in kept) / count
    mean_l = math.fsum(value for *_, value in kept) / count
    return {(name, place): (a - mean_a) * (v - mean_l) for name, place, a, v in kept}


@given(rows=rows, share=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_kl_cov_takes_the_highest_covariances(rows, share):
    found = chosen(KlCovLoss, batch_of(rows), share=share)
    known = covariance(rows)
    count = max(int(len(known) * share), 1) if known and share else 0
    assert len(found) == count
    if 0 < count < len(known):
        least = min(known[token] for token in found)
        assert least >= max(v for token, v in known.items() if token not in found) - 1e-4


@given(rows=rows, share=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_clip_cov_takes_some_of_those_between_the_bounds(rows, share):
    low, high = -0.501, 3.003
    found = chosen(ClipCovLoss, batch_of(rows), share=share, cov_low=low, cov_high=high)
    known = covariance(rows)
    between = {token for token, v in known.items() if low + 1e-4 < v < high - 1e-4}
    unclear = {t for t, v in known.items() if min(abs(v - low), abs(v - high)) <= 1e-4}
    count = max(int(len(known) * share), 1) if known and share else 0
    assert found <= between | unclear
    assert min(count, len(between)) <= len(found) <= count


@pytest.mark.parametrize(
    ("plugin", "settings"),
    [
        (KlCovLoss, {"share": 0.05}),
        (ClipCovLoss, {"share": 0.05, "cov_low": -1.0, "cov_high": 1.0}),
    ],
)
class TestTheChoice:
    def test_is_the_same_on_any_ranks_and_in_any_order(self, plugin, settings):
        batch = random_batch()
        want = chosen(plugin, batch, **settings)
        shuffled = batch.take(np.random.default_rng(1).permutation(len(batch)))
        assert len(want) == int(0.05 * batch["response_mask"].values.sum())
        assert chosen(plugin, shuffled, **settings) == want
        for ranks in (2, 3):
            cut = [part.astype(int) for part in np.array_split(np.arange(len(batch)), ranks)]
            found = on_ranks(
                ranks,
                lambda rank, reduction, cut=cut: chosen(
                    plugin, shuffled.take(cut[rank]), reduction, **settings
                ),
            )
            assert set().union(*found) == want

    def test_is_exact_where_all_covariances_are_equal(self, plugin, settings):
        batch = batch_of([(1.0, [(-1.0, True)] * 50)] * 4)
        assert len(chosen(plugin, batch, **settings)) == 10

    def test_takes_advantages_by_token_too(self, plugin, settings):
        batch = random_batch()
        mask = batch["response_mask"]
        tokens = mask.with_values(np.repeat(batch["advantages"], mask.lengths))
        again = chosen(plugin, batch.with_columns({"advantages": tokens}), **settings)
        assert again == chosen(plugin, batch, **settings)

    def test_needs_its_columns(self, plugin, settings):
        with pytest.raises(ColumnError, match=f"{plugin.name}' needs 'sample_id'"):
            chosen(plugin, random_batch().drop(["sample_id"]), **settings)


def test_the_random_choice_follows_the_seed_and_spreads_evenly():
    batch = random_batch(300)
    settings = {"share": 0.1, "cov_low": -100.0, "cov_high": 100.0}
    one, other = (chosen(ClipCovLoss, batch, seed=seed, **settings) for seed in (0, 1))
    # Two independent samples of a tenth of the tokens have a tenth of their tokens in common.
    assert len(one & other) / len(one) == pytest.approx(0.1, abs=0.04)
    first_half = sum(int(name[1:]) < 150 for name, _ in one) / len(one)
    assert first_half == pytest.approx(
        batch.slice(0, 150)["response_mask"].values.sum() / batch["response_mask"].values.sum(),
        abs=0.06,
    )


@given(st.lists(st.integers(0, 2**64 - 1), max_size=30, unique=True), st.integers(0, 31))
def test_largest_keys_are_those_of_a_sorted_list(keys, count):
    keys_T = np.array(keys, np.uint64)
    mask_T = np.ones(len(keys), bool)
    mask_T[::3] = False
    found = keys_T[largest(keys_T, mask_T, count, LocalReduction())].tolist()
    assert sorted(found) == sorted(sorted(keys_T[mask_T].tolist())[::-1][:count])


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=20))
def test_keys_rank_as_their_values_do(numbers):
    values_T = np.array(numbers, np.float32)
    order = np.argsort(ordered_keys(values_T, np.zeros(len(numbers), np.uint64)), kind="stable")
    assert np.all(np.diff(values_T[order]) >= 0)


def test_hashes_differ_by_sample_position_and_seed():
    rows = Ragged.from_list([[0.0] * 1000, [0.0] * 1000], dtype=np.float32)
    hashes = [token_hashes(["a", "b"], rows, seed) for seed in (0, 1)]
    assert len(np.unique(np.concatenate(hashes))) == 4000
    assert np.array_equal(token_hashes(["b"], rows.slice(0, 1), 0), hashes[0][1000:])


def test_the_defaults_are_those_of_the_reference():
    assert (ClipCovConfig().share, ClipCovConfig().cov_low, ClipCovConfig().cov_high) == (
        2e-4,
        1,
        5,
    )
    assert (KlCovConfig().share, KlCovConfig().coef) == (2e-4, 1)


def test_a_rounding_error_in_the_log_probabilities_does_not_pull():
    import torch

    from dovetail.interfaces import LossInputs, PluginContext
    from dovetail_algorithms.losses.kl_cov import CHOSEN, KlCovLoss

    def gradient(apart: float) -> torch.Tensor:
        log_probs_T = torch.full((4,), -1.0, requires_grad=True)
        inputs = LossInputs(
            log_probs_T=log_probs_T,
            mask_T=torch.ones(4, dtype=torch.bool),
            offsets_N1=torch.tensor([0, 4]),
            columns={
                "old_log_probs": torch.full((4,), -1.0 + apart),
                "advantages": torch.zeros(4),
                CHOSEN: torch.ones(4),
            },
        )
        KlCovLoss(KlCovLoss.Config(coef=2.0), PluginContext()).token_losses(
            inputs
        ).losses_T.sum().backward()
        assert log_probs_T.grad is not None
        return log_probs_T.grad

    torch.testing.assert_close(gradient(6e-7), torch.zeros(4))
    torch.testing.assert_close(gradient(0.1), torch.full((4,), -2.0))
