"""Loss aggregations, against slow loops, and cut into micro-batches."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from dovetail.batch import Ragged
from dovetail.interfaces import PluginContext
from dovetail.sections import PluginSection
from dovetail_stages.config import SeqMeanTokenSumNormConfig
from dovetail_stages.numerics import loss_aggregation as aggregations

CONFIGS = {
    aggregations.TokenMean: PluginSection(),
    aggregations.TokenSum: PluginSection(),
    aggregations.SeqMeanTokenSum: PluginSection(),
    aggregations.SeqMeanTokenMean: PluginSection(),
    aggregations.SeqMeanTokenSumNorm: SeqMeanTokenSumNormConfig(length=7),
}

samples = st.lists(
    st.lists(st.tuples(st.floats(-10, 10), st.booleans()), max_size=6), min_size=1, max_size=6
)


def oracle(name, rows):
    """The aggregate of lists of (loss, mask) pairs, by its definition."""
    kept = [[loss for loss, mask in row if mask] for row in rows]
    present = [row for row in kept if row]
    tokens = sum(len(row) for row in kept)
    total = math.fsum(loss for row in kept for loss in row)
    if name == "token_sum" or not tokens:
        return total
    if name == "token_mean":
        return total / tokens
    if name == "seq_mean_token_mean":
        return math.fsum(math.fsum(row) / len(row) for row in present) / len(present)
    length = 7 if name == "seq_mean_token_sum_norm" else 1
    return total / len(present) / length


def packed(rows):
    losses = Ragged.from_list([[loss for loss, _ in row] for row in rows], dtype=np.float64)
    mask = Ragged.from_list([[kept for _, kept in row] for row in rows], dtype=bool)
    return losses, mask


def aggregate(plugin, rows, cut):
    """The aggregate from totals over two parts of the rows, and the denominator over all rows."""
    losses, mask = packed(rows)
    denominator = plugin.denominator(mask)
    parts = [(0, cut), (cut, len(rows))]
    total = sum(
        plugin.total(
            torch.from_numpy(losses.slice(*part).values.copy()),
            torch.from_numpy(mask.slice(*part).values.copy()),
            torch.from_numpy(mask.slice(*part).offsets),
        )
        for part in parts
    )
    return float(total) / (denominator or 1.0), denominator


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.name)
@settings(max_examples=30)
@given(rows=samples, data=st.data())
def test_the_aggregate_is_its_definition_however_it_is_cut(cls, rows, data):
    plugin = cls(CONFIGS[cls], PluginContext())
    cut = data.draw(st.integers(0, len(rows)))
    value, _ = aggregate(plugin, rows, cut)
    assert math.isclose(value, oracle(cls.name, rows), rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.name)
def test_masked_tokens_have_no_say_even_where_they_are_not_finite(cls):
    plugin = cls(CONFIGS[cls], PluginContext())
    losses_T = torch.tensor([1.0, math.nan, 2.0, math.inf], requires_grad=True)
    mask_T = torch.tensor([True, False, True, False])
    total = plugin.total(losses_T, mask_T, torch.tensor([0, 2, 4]))
    total.backward()
    assert total.item() == 3.0
    assert losses_T.grad.tolist() == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.name)
@settings(max_examples=20)
@given(rows=samples, data=st.data())
def test_each_token_has_the_gradient_of_the_definition_however_it_is_cut(cls, rows, data):
    plugin = cls(CONFIGS[cls], PluginContext())
    cut = data.draw(st.integers(0, len(rows)))
    losses, mask = packed(rows)
    denominator = plugin.denominator(mask) or 1.0
    losses_T = torch.tensor(losses.values, requires_grad=True)
    for start, stop in ((0, cut), (cut, len(rows))):
        part = slice(losses.offsets[start], losses.offsets[stop])
        mask_T = torch.tensor(mask.values[part])
        offsets_N1 = torch.from_numpy(mask.slice(start, stop).offsets)
        (plugin.total(losses_T[part], mask_T, offsets_N1) / denominator).backward()
    want = []
    for index, row in enumerate(rows):
        for place, (loss, kept) in enumerate(row):
            moved = [[*other] for other in rows]
            # Every aggregate is linear in each loss: a step of 1 gives the slope.
            moved[index][place] = (loss + 1, kept)
            want.append(oracle(cls.name, moved) - oracle(cls.name, rows))
    got = torch.zeros_like(losses_T) if losses_T.grad is None else losses_T.grad
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def test_means_by_sample_leave_out_what_is_masked_and_are_0_for_the_empty():
    values_T = torch.tensor([1.0, math.nan, 3.0, 5.0, math.inf])
    mask_T = torch.tensor([True, False, True, True, False])
    offsets_N1 = torch.tensor([0, 0, 3, 4, 5, 5])
    means_N = aggregations.mean_by_sample(values_T, mask_T, offsets_N1)
    assert means_N.tolist() == [0.0, 2.0, 5.0, 0.0, 0.0]
    assert aggregations.mean_by_sample(values_T[:0], mask_T[:0], offsets_N1[:1]).tolist() == []
    assert aggregations.sum_by_sample(values_T[:0], offsets_N1[[0, 0, 0]]).tolist() == [0.0, 0.0]
