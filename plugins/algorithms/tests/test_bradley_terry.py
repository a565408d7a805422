"""The Bradley–Terry loss against a plain oracle, its gradient exactly, and whatever the cut into micro-batches."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError, NumericsError
from dovetail.interfaces import PluginContext
from dovetail.metrics import values
from dovetail_algorithms.config.objectives import BradleyTerryConfig
from dovetail_algorithms.objectives.bradley_terry import (
    BradleyTerry,
    preference_scores,
    with_other_scores,
)
from dovetail_sdk.testing import update_of


def pairs(scores, order=None, seed=0):
    """Pairs with these scores, chosen first or as `order` says; each response has its score at a random token."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, len(scores))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.zeros(offsets[-1], np.bool_)
    places = offsets[:-1] + rng.integers(0, lengths)
    mask[places] = True
    column = rng.normal(size=offsets[-1]).astype(np.float32)
    column[places] = scores
    chosen_P = np.ones(len(scores) // 2, np.bool_) if order is None else np.asarray(order, np.bool_)
    batch = Batch(
        {
            "response_mask": Ragged(mask, offsets),
            "chosen": np.stack([chosen_P, ~chosen_P], 1).reshape(-1),
            "current": Ragged(column, offsets),
        }
    )
    return with_other_scores(batch, preference_scores(batch["current"], batch["response_mask"]))


def run(batch, parts=None):
    """Loss as reported, gradient by the values at the scored tokens, metrics."""
    goal = BradleyTerry(BradleyTerryConfig(name="bradley_terry"), PluginContext())
    found = update_of(goal, batch, {"values": batch["current"].values}, parts=parts)
    mask, gradient_T = batch["response_mask"].values, found.gradients["values"]
    assert not gradient_T[~mask].any()
    metrics = values(found.metrics)
    return metrics["reward_model/loss"], gradient_T[mask], metrics


def oracle(batch):
    """Equation 1 of arXiv 2203.02155, pair by pair, by torch's own derivative of the plain formula in float64."""
    scores = preference_scores(batch["current"], batch["response_mask"]).astype(np.float64)
    r = torch.tensor(scores, requires_grad=True)
    losses = []
    for pair in range(len(scores) // 2):
        a, b = 2 * pair, 2 * pair + 1
        chosen, rejected = (a, b) if batch["chosen"][a] else (b, a)
        losses.append(-torch.nn.functional.logsigmoid(r[chosen] - r[rejected]))
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), r.grad.numpy()


@st.composite
def batches(draw):
    count = draw(st.integers(1, 6))
    score = st.floats(-30, 30, width=32)
    scores = draw(st.lists(score, min_size=2 * count, max_size=2 * count))
    order = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return pairs(scores, order, seed=draw(st.integers(0, 100)))


@settings(max_examples=40)
@given(batches(), st.randoms(use_true_random=False))
def test_loss_and_gradient_are_bradley_terrys_however_the_batch_is_cut(batch, random):
    order = list(range(len(batch)))
    random.shuffle(order)
    cut = random.randrange(len(order))
    expected_loss, expected_gradient = oracle(batch)
    for parts in (None, [part for part in (order[:cut], order[cut:]) if part]):
        loss, gradient, _ = run(batch, parts)
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
        assert gradient == pytest.approx(expected_gradient, rel=1e-5, abs=1e-7)


def test_two_pairs_by_hand():
    loss, gradient, metrics = run(pairs([1.0, 0.0, 0.0, 2.0]))
    sigma = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    assert loss == pytest.approx((-math.log(sigma(1)) - math.log(sigma(-2))) / 2, rel=1e-6)
    expected = [-sigma(-1) / 2, sigma(-1) / 2, -sigma(2) / 2, sigma(2) / 2]
    assert gradient == pytest.approx(expected, rel=1e-6)
    assert metrics["reward_model/accuracy"] == 0.5
    assert metrics["reward_model/margin"] == pytest.approx(-0.5)


def test_far_scores_overflow_nothing():
    loss, gradient, _ = run(pairs([-1e4, 1e4]))
    assert loss == pytest.approx(2e4)
    assert gradient == pytest.approx([-1.0, 1.0])


def test_pairs_are_one_chosen_and_one_rejected():
    batch = pairs([1.0, 0.0])
    both = batch.with_columns({"chosen": np.array([True, True])})
    with pytest.raises(ColumnError, match="not pairs of neighbours with one chosen each"):
        with_other_scores(both, np.zeros(2, np.float32))
    with pytest.raises(ColumnError, match="not pairs of neighbours"):
        with_other_scores(batch.take(np.array([0])), np.zeros(1, np.float32))


def test_a_response_is_scored_at_one_token():
    batch = pairs([1.0, 0.0])
    mask = batch["response_mask"]
    nowhere = batch.with_columns({"response_mask": mask.with_values(np.zeros_like(mask.values))})
    with pytest.raises(ColumnError, match="sample 0 has 0 tokens in response_mask"):
        run(nowhere)


def test_a_score_that_is_not_finite_is_refused_by_name():
    batch = pairs([1.0, 0.0]).with_columns(
        {"other_scores": np.array([0.0, np.nan], np.float32), "sample_id": ["a", "b"]}
    )
    with pytest.raises(NumericsError, match="'other_scores' is not finite in sample b"):
        run(batch)


def test_a_column_is_missing():
    with pytest.raises(ColumnError, match="other_scores"):
        run(pairs([1.0, 0.0]).drop({"other_scores"}))
