"""The negative log-likelihood against a plain oracle, value and gradient, however samples are cut into micro-batches and ranks."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import PluginContext
from dovetail.metrics import values
from dovetail.sections import PluginSection
from dovetail_algorithms.config.objectives import NllConfig
from dovetail_algorithms.objectives.nll import NegativeLogLikelihood, Perplexity
from dovetail_sdk.testing import update_of


def batch_of(lengths, seed=0):
    """Responses of these lengths, most of whose tokens have mask 1."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = Ragged(rng.random(offsets[-1]) < 0.7, offsets)
    log_probs_T = -rng.exponential(size=offsets[-1]).astype(np.float32)
    return Batch({"response_mask": mask, "current": mask.with_values(log_probs_T)})


def update(batch, aggregation="token_mean", **how):
    config = NllConfig(name="nll", loss_aggregation=PluginSection(name=aggregation))
    goal = NegativeLogLikelihood(config, PluginContext())
    return update_of(goal, batch, {"log_probs": batch["current"].values}, **how)


def oracle(batch):
    """Radford et al. (2018), equation 1, over the trained tokens, and its derivative, token by token in float64."""
    mask_T, log_probs_T = batch["response_mask"].values, batch["current"].values.astype(np.float64)
    count = max(int(mask_T.sum()), 1)
    return -sum(log_probs_T[mask_T]) / count, np.where(mask_T, -1 / count, 0.0)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 100), st.data())
def test_loss_and_gradient_are_the_oracles_however_samples_are_cut(lengths, seed, data):
    batch = batch_of(lengths, seed)
    part_N = data.draw(st.lists(st.integers(0, 2), min_size=len(batch), max_size=len(batch)))
    expected_loss, expected_gradient = oracle(batch)
    for parts in (None, [np.flatnonzero(np.array(part_N) == part).tolist() for part in range(3)]):
        found = update(batch, parts=parts)
        assert found.loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-7)
        assert found.gradients["log_probs"] == pytest.approx(expected_gradient, rel=1e-6)
        metrics = values(found.metrics)
        assert metrics["actor/loss"] == pytest.approx(expected_loss, rel=1e-6, abs=1e-7)
        if batch["response_mask"].values.any():
            assert metrics["actor/perplexity"] == pytest.approx(math.exp(expected_loss), rel=1e-6)


def test_another_aggregation_weighs_tokens_its_way():
    batch = batch_of([3, 1, 5, 2])
    mask, nll = batch["response_mask"], -batch["current"].values.astype(np.float64)
    rows = [slice(a, b) for a, b in zip(mask.offsets[:-1], mask.offsets[1:], strict=True)]
    means = [nll[row][mask.values[row]].mean() for row in rows if mask.values[row].any()]
    found = update(batch, aggregation="seq_mean_token_mean")
    assert found.loss == pytest.approx(np.mean(means), rel=1e-6)


def test_perplexity_is_of_all_tokens_together_and_overflows_to_infinity():
    both = Perplexity(2.0, 1.0).merge(Perplexity(4.0, 5.0))
    assert both.value == pytest.approx(math.e)
    assert math.isnan(Perplexity(0.0, 0.0).value)
    assert Perplexity(1e4, 1.0).value == math.inf
