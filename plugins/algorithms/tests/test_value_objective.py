"""The value loss against a plain oracle, its gradient by differences, and explained variance."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError, NumericsError
from dovetail.interfaces import PluginContext
from dovetail.metrics import merge_metrics, values
from dovetail.sections import PluginSection
from dovetail_algorithms.config.objectives import ValueConfig
from dovetail_algorithms.objectives.value import ValueObjective
from dovetail_sdk.testing import update_of
from dovetail_stages import ExplainedVariance

AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean")


def objective(aggregation="token_mean", clip=0.5):
    section = PluginSection(name=aggregation)
    config = ValueConfig(name="value", loss_aggregation=section, clip=clip)
    return ValueObjective(config, PluginContext())


def mini_batch(seed=0, lengths=(3, 0, 5, 1, 4), *, dense=False, spread=1.0):
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    column = lambda: Ragged((rng.normal(size=offsets[-1]) * spread).astype(np.float32), offsets)  # noqa: E731
    returns = rng.normal(size=len(lengths)).astype(np.float32) if dense else column()
    return Batch(
        {
            "response_mask": Ragged(rng.random(offsets[-1]) < 0.7, offsets),
            "values": column(),
            "returns": returns,
            "current": column(),
        }
    )


def run(goal, batch, parts=None):
    """Return loss, gradient by the values and metrics, with the samples cut into micro-batches."""
    found = update_of(goal, batch, {"values": batch["current"].values}, parts=parts)
    return found.loss, found.gradients["values"], found.metrics


def oracle(batch, aggregation, clip):
    """Compute the loss of arXiv 1707.06347 and its gradient by the values, sample by sample, in float64."""
    mask, current = batch["response_mask"], batch["current"]
    losses, grads, lengths = [], [], []
    for i in range(len(batch)):
        row_losses, row_grads = [], []
        for t in range(len(mask[i])):
            returns = batch["returns"]
            r = float(returns[i][t] if isinstance(returns, Ragged) else returns[i])
            v, old = float(current[i][t]), float(batch["values"][i][t])
            loss, grad = 0.5 * (v - r) ** 2, v - r
            if clip is not None:
                near = min(max(v, old - clip), old + clip)
                if 0.5 * (near - r) ** 2 > loss:
                    loss, grad = 0.5 * (near - r) ** 2, (near - r if near == v else 0.0)
            row_losses.append(loss if mask[i][t] else 0.0)
            row_grads.append(grad if mask[i][t] else 0.0)
        losses.append(row_losses)
        grads.append(row_grads)
        lengths.append(int(mask[i].sum()))
    sequences, tokens = max(sum(n > 0 for n in lengths), 1), max(sum(lengths), 1)
    total, out = 0.0, []
    for row_losses, row_grads, length in zip(losses, grads, lengths, strict=True):
        divisor = {
            "token_mean": tokens,
            "token_sum": 1,
            "seq_mean_token_sum": sequences,
            "seq_mean_token_mean": sequences * max(length, 1),
        }[aggregation]
        total += sum(row_losses) / divisor
        out += [grad / divisor for grad in row_grads]
    return total, np.array(out)


@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    aggregation=st.sampled_from(AGGREGATIONS),
    clip=st.sampled_from([None, 0.01, 0.5, 100.0]),
    dense=st.booleans(),
    spread=st.sampled_from([0.0, 1.0, 1000.0]),
)
def test_it_is_its_definition_however_samples_are_cut(
    seed, lengths, aggregation, clip, dense, spread
):
    batch = mini_batch(seed, lengths, dense=dense, spread=spread)
    expected, expected_grad = oracle(batch, aggregation, clip)
    scale = max(spread, 1.0)
    for parts in (None, [[row] for row in reversed(range(len(batch)))]):
        loss, grad, _ = run(objective(aggregation, clip), batch, parts)
        assert math.isclose(loss, expected, rel_tol=1e-4, abs_tol=1e-5)
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-4, atol=1e-5 * scale)


def test_the_gradient_is_that_of_differences():
    batch = mini_batch(3)
    goal = objective(clip=0.3)
    _, grad, _ = run(goal, batch)
    current, step = batch["current"], 1e-3
    assert np.count_nonzero(grad) > 3
    for place in range(len(grad)):
        moved = []
        for sign in (1, -1):
            shifted = current.values.astype(np.float64)
            shifted[place] += sign * step
            other = batch.with_columns({"current": current.with_values(shifted)})
            moved.append(oracle(other, "token_mean", 0.3)[0])
        assert math.isclose(grad[place], (moved[0] - moved[1]) / (2 * step), abs_tol=1e-3)


def test_metrics_are_what_they_say():
    batch = mini_batch()
    loss, _, metrics = run(objective(clip=0.2), batch)
    mask = batch["response_mask"].values
    v, old, r = (batch[n].values[mask].astype(float) for n in ("current", "values", "returns"))
    near = np.clip(v, old - 0.2, old + 0.2)
    expected = {
        "critic/value_loss": loss,
        "critic/value_mean": v.mean(),
        "critic/return_mean": r.mean(),
        "critic/value_error": np.abs(v - r).mean(),
        "critic/value_clip_frac": ((near - r) ** 2 > (v - r) ** 2).mean(),
        "critic/explained_variance": 1 - np.var(r - old) / np.var(r),
    }
    assert values(metrics).keys() == expected.keys()
    for name, value in expected.items():
        assert math.isclose(metrics[name].value, value, rel_tol=1e-5), name
    assert 0 < expected["critic/value_clip_frac"] < 1
    assert "critic/value_clip_frac" not in run(objective(clip=None), batch)[2]


def test_without_a_single_token_the_loss_is_0():
    batch = mini_batch()
    empty = batch.with_columns(
        {"response_mask": batch["response_mask"].with_values(np.zeros(13, bool))}
    )
    loss, grad, metrics = run(objective(), empty)
    assert loss == 0
    assert not grad.any()
    assert values(metrics) == {"critic/value_loss": 0.0}


def test_bad_input_is_refused():
    batch, goal = mini_batch(), objective()
    with pytest.raises(ColumnError, match="objective 'value' needs 'returns'"):
        run(goal, batch.drop(["returns"]))
    bad = np.full(5, np.nan, np.float32)
    with pytest.raises(NumericsError, match="'returns' is not finite"):
        run(goal, batch.with_columns({"returns": bad}))


@given(
    seed=st.integers(0, 10_000),
    cuts=st.lists(st.integers(0, 12), max_size=3),
    shift=st.sampled_from([0.0, 1e6]),
)
def test_explained_variance_merges_without_cancellation(seed, cuts, shift):
    rng = np.random.default_rng(seed)
    returns, mask = rng.normal(size=12) + shift, rng.random(12) < 0.8
    guesses = returns + 0.3 * rng.normal(size=12)
    whole = ExplainedVariance.of(guesses, returns, mask)
    pieces = np.split(np.arange(12), sorted(cuts))
    merged = merge_metrics(
        {"ev": ExplainedVariance.of(guesses[piece], returns[piece], mask[piece])}
        for piece in pieces
    )["ev"]
    if mask.sum() < 2:
        assert math.isnan(whole.value)
        assert math.isnan(merged.value)
        return
    expected = 1 - np.var((returns - guesses)[mask]) / np.var(returns[mask])
    assert math.isclose(whole.value, expected, rel_tol=1e-6, abs_tol=1e-9)
    assert math.isclose(merged.value, expected, rel_tol=1e-6, abs_tol=1e-9)
    assert math.isnan(ExplainedVariance.of(guesses, np.ones(12), mask).value)
