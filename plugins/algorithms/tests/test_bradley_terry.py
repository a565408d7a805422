"""The Bradley–Terry loss against a plain oracle, value and gradient, however pairs are cut into micro-batches and ranks."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces import PluginContext
from dovetail.metrics import values
from dovetail_algorithms.config.objectives import BradleyTerryConfig
from dovetail_algorithms.objectives.bradley_terry import BradleyTerry
from dovetail_sdk.testing import update_of


def pairs(scores, order=None, seed=0):
    """Return a batch of pairs with these scores, chosen first, or in `order`; each sample has its score at a random token."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, len(scores))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.zeros(offsets[-1], np.bool_)
    places = offsets[:-1] + rng.integers(0, lengths)
    mask[places] = True
    column = rng.normal(size=offsets[-1]).astype(np.float32)
    column[places] = scores
    batch = Batch(
        {
            "response_mask": Ragged(mask, offsets),
            "pair_id": 100 - np.arange(len(scores)) // 2,
            "chosen": np.arange(len(scores)) % 2 == 0,
            "current": Ragged(column, offsets),
        }
    )
    return batch if order is None else batch.take(np.array(order))


def update(batch, **how):
    goal = BradleyTerry(BradleyTerryConfig(name="bradley_terry"), PluginContext())
    return update_of(goal, batch, {"values": batch["current"].values}, **how)


def run(batch, **how):
    """Return the loss, its gradient by the scores [N], and metrics."""
    found = update(batch, **how)
    mask, gradient_T = batch["response_mask"].values, found.gradients["values"]
    assert not gradient_T[~mask].any()
    metrics = values(found.metrics)
    assert metrics["actor/loss"] == pytest.approx(found.loss, rel=1e-6)
    return found.loss, gradient_T[mask], metrics


def oracle(batch):
    """Equation 1 of arXiv 2203.02155 and its derivative by the scores [N], pair by pair, in float64."""
    scores_N = batch["current"].values[batch["response_mask"].values].astype(np.float64)
    loss, gradient_N, ids = 0.0, np.zeros(len(batch)), set(batch["pair_id"].tolist())
    for pair in ids:
        (w,) = np.flatnonzero((batch["pair_id"] == pair) & batch["chosen"])
        (l,) = np.flatnonzero((batch["pair_id"] == pair) & ~batch["chosen"])  # noqa: E741
        margin = scores_N[w] - scores_N[l]
        loss += np.logaddexp(0, -margin) / len(ids)
        gradient_N[l] = np.exp(-np.logaddexp(0, margin)) / len(ids)
        gradient_N[w] = -gradient_N[l]
    return loss, gradient_N


@st.composite
def batches(draw):
    count = draw(st.integers(1, 6))
    score = st.floats(-30, 30, width=32)
    scores = draw(st.lists(score, min_size=2 * count, max_size=2 * count))
    order = draw(st.permutations(range(2 * count)))
    return pairs(scores, order, seed=draw(st.integers(0, 100)))


@given(batches(), st.data())
def test_loss_and_gradient_are_bradley_terrys_however_pairs_are_cut_into_micro_batches(batch, data):
    ids_P = np.unique(batch["pair_id"])
    part_P = data.draw(st.lists(st.integers(0, 2), min_size=len(ids_P), max_size=len(ids_P)))
    part_N = np.array(part_P)[np.searchsorted(ids_P, batch["pair_id"])]
    expected_loss, expected_gradient = oracle(batch)
    for parts in (None, [np.flatnonzero(part_N == part).tolist() for part in range(3)]):
        loss, gradient, _ = run(batch, parts=parts)
        assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-6)
        assert gradient == pytest.approx(expected_gradient, rel=1e-6, abs=1e-6)


def test_two_pairs_by_hand():
    loss, gradient, metrics = run(pairs([1.0, 0.0, 0.0, 2.0]))
    sigma = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    assert loss == pytest.approx((-math.log(sigma(1)) - math.log(sigma(-2))) / 2, rel=1e-6)
    expected = [-sigma(-1) / 2, sigma(-1) / 2, -sigma(2) / 2, sigma(2) / 2]
    assert gradient == pytest.approx(expected, rel=1e-6)
    assert metrics["actor/accuracy"] == 0.5
    assert metrics["actor/margin"] == pytest.approx(-0.5)


def test_far_scores_overflow_nothing():
    loss, gradient, _ = run(pairs([-1e4, 1e4]))
    assert loss == pytest.approx(2e4)
    assert gradient == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"chosen": [True, False, True, True]}, "pair_id 99 has 2 chosen and 0 rejected"),
        ({"chosen": [False, False, True, False]}, "pair_id 100 has 0 chosen and 2 rejected"),
        ({"pair_id": [7, 7, 7, 7]}, "pair_id 7 has 2 chosen and 2 rejected"),
        ({"pair_id": [1, 2, 3, 3]}, "pair_id 1 has 1 chosen and 0 rejected"),
    ],
)
def test_a_pair_is_one_chosen_and_one_rejected_response(columns, found):
    batch = pairs([1.0, 0.0, 1.0, 0.0])
    with pytest.raises(ColumnError, match=found):
        run(batch.with_columns({name: np.array(column) for name, column in columns.items()}))


def test_half_a_pair_is_refused():
    with pytest.raises(ColumnError, match="pair_id 99 has 1 chosen and 0 rejected"):
        run(pairs([1.0, 0.0, 1.0, 0.0]).take(np.array([0, 1, 2])))


def test_a_response_is_scored_at_one_token():
    batch = pairs([1.0, 0.0])
    mask = batch["response_mask"]
    nowhere = batch.with_columns({"response_mask": mask.with_values(np.zeros_like(mask.values))})
    with pytest.raises(ColumnError, match="response_mask of sample 0 selects 0"):
        run(nowhere)


@pytest.mark.parametrize("score", [np.nan, np.inf])
def test_a_score_that_is_not_finite_is_reported(score):
    assert not update(pairs([1.0, 0.0, 0.0, score])).finite


@pytest.mark.parametrize("column", ["chosen", "pair_id"])
def test_a_column_is_missing(column):
    with pytest.raises(ColumnError, match=column):
        run(pairs([1.0, 0.0]).drop({column}))


def test_a_margin_is_by_how_much_the_chosen_response_is_to_be_ahead():
    batch = pairs([2.0, 1.0]).with_columns({"margin": np.array([1.0, 1.0], np.float32)})
    goal = BradleyTerry(BradleyTerryConfig(name="bradley_terry", margin=True), PluginContext())
    found = update_of(goal, batch, {"values": batch["current"].values})
    assert found.loss == pytest.approx(math.log(2), rel=1e-6)
    assert values(found.metrics)["actor/margin"] == pytest.approx(1.0)


def test_the_brier_score_is_of_the_preference_that_scores_imply():
    """The scores imply probabilities σ(1) and σ(-2) that the chosen response is preferred."""
    _, _, metrics = run(pairs([1.0, 0.0, 0.0, 2.0]))
    likely = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2))]
    expected = sum((1 - p) ** 2 for p in likely) / 2
    assert metrics["actor/brier"] == pytest.approx(expected, rel=1e-6)
