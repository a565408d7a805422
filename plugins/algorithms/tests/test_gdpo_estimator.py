"""GDPO, against a loop written from the paper."""

import statistics

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces import Groups, PluginContext
from dovetail_algorithms.config.estimators import GdpoConfig
from dovetail_algorithms.estimators.gdpo import GdpoEstimator

values = st.one_of(st.sampled_from([0.0, 0.1, 1.0, 1e20]), st.floats(-100, 100, width=32))
# Each sample has a group, two reward components, and a response mask.
samples = st.lists(
    st.tuples(st.integers(0, 3), values, values, st.lists(st.booleans(), max_size=5)),
    min_size=1,
    max_size=16,
)


def oracle(rows, weights, norm_by_std):
    totals = [0.0] * len(rows)
    for part, weight in enumerate(weights, start=1):
        for i, row in enumerate(rows):
            group = [other[part] for other in rows if other[0] == row[0]]
            if len(set(group)) < 2:
                continue
            centred = row[part] - statistics.fmean(group)
            scale = statistics.stdev(group) + 1e-6 if norm_by_std else 1.0
            totals[i] += weight * centred / scale
    compared = [sum(other[0] == row[0] for other in rows) > 1 for row in rows]
    tokens = [
        total
        for total, row, there in zip(totals, rows, compared, strict=True)
        for _ in range(sum(row[3]) if there else 0)
    ]
    # statistics.mean is exact, so equal tokens deviate by exactly 0.
    mean = statistics.mean(tokens) if tokens else 0.0
    var = statistics.variance(tokens) if len(tokens) > 1 else 0.0
    return [
        (total - mean) / np.sqrt(var + 1e-8) if there and any(row[3]) else 0.0
        for total, row, there in zip(totals, rows, compared, strict=True)
    ]


def estimate(rows, **config):
    batch = Batch(
        {
            "reward_components": [{"b": row[2], "a": row[1]} for row in rows],
            "response_mask": Ragged.from_list([row[3] for row in rows], dtype=bool),
        }
    )
    groups = Groups.of(np.array([row[0] for row in rows]))
    return GdpoEstimator(GdpoConfig(**config), PluginContext()).estimate(batch, groups)


@given(samples, st.booleans())
def test_advantages_equal_the_papers_formula(rows, norm_by_std):
    result = estimate(rows, norm_by_std=norm_by_std)
    expected = oracle(rows, (1.0, 1.0), norm_by_std)
    np.testing.assert_allclose(result.advantages, expected, rtol=1e-3, atol=1e-3)


@given(samples)
def test_weights_follow_the_order_of_the_named_components(rows):
    swapped = [(g, b, a, mask) for g, a, b, mask in rows]
    result = estimate(rows, components=("b", "a"), weights=(2.0, 0.5))
    expected = oracle(swapped, (2.0, 0.5), True)
    np.testing.assert_allclose(result.advantages, expected, rtol=1e-3, atol=1e-3)


def test_one_component_of_two_can_be_left_out():
    rows = [(0, 1.0, 5.0, [True]), (0, 0.0, 9.0, [True])]
    np.testing.assert_allclose(
        estimate(rows, components=("a",)).advantages, [0.5**0.5, -(0.5**0.5)], rtol=1e-4
    )


def test_a_dominant_component_does_not_drown_the_others():
    rows = [(0, a, 1000.0 * b, [True]) for a, b in [(0, 0), (1, 0), (0, 1), (1, 1)]]
    advantages = estimate(rows).advantages
    np.testing.assert_allclose(advantages[1], advantages[2], atol=1e-4)


def broken(parts, **config):
    batch = Batch(
        {
            "reward_components": parts,
            "response_mask": Ragged.from_list([[True]] * len(parts), dtype=bool),
        }
    )
    with pytest.raises(ColumnError) as caught:
        GdpoEstimator(GdpoConfig(**config), PluginContext()).estimate(
            batch, Groups.of(np.zeros(len(parts)))
        )
    return str(caught.value)


def test_a_sample_without_a_component_is_named_with_what_it_has():
    message = broken([{"accuracy": 1.0}, {"acuracy": 0.0}], components=("accuracy",))
    for part in ("gdpo", "'accuracy'", "sample 1", "acuracy=0.0", "did you mean 'acuracy'"):
        assert part in message


def test_samples_with_different_components_are_refused():
    assert "'b'" in broken([{"a": 1.0, "b": 1.0}, {"a": 0.0}])


def test_a_reward_without_components_is_refused():
    assert "no sample has any" in broken([{}, {}])
    assert "no sample has any" in broken([None, None])


def test_a_component_that_is_no_number_is_refused():
    assert "'high'" in broken([{"a": 1.0}, {"a": "high"}])


def test_as_many_weights_as_components():
    with pytest.raises(ValueError, match=r"2 value\(s\),.* has 1 "):
        GdpoConfig(components=("a",), weights=(1.0, 2.0))
    with pytest.raises(ValueError, match=r"\(none\)"):
        GdpoConfig(weights=(1.0,))
