"""Ragged columns against plain lists of lists."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from dovetail.batch import Ragged
from dovetail.errors import ColumnError

calm = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
"""For machines that others use as well."""
ROWS = st.lists(st.lists(st.integers(-1000, 1000), max_size=5), max_size=8)


def packed(rows: list[list[int]]) -> Ragged:
    return Ragged.from_list(rows, dtype=np.int64)


@calm
@given(ROWS)
def test_it_holds_what_it_was_given(rows):
    ragged = packed(rows)
    assert ragged.to_list() == rows
    assert [row.tolist() for row in ragged] == rows
    assert len(ragged) == len(rows)
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    assert ragged.lengths.dtype == np.int64
    assert ragged.row_index.tolist() == [i for i, row in enumerate(rows) for _ in row]
    sums = ragged.sum()
    assert sums.dtype == np.float64
    assert sums.tolist() == [sum(row) for row in rows]


@calm
@given(ROWS, st.data())
def test_take_slice_repeat_concat_are_those_of_lists(rows, data):
    ragged = packed(rows)
    index = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=10)) if rows else []
    start, stop = data.draw(st.integers(-9, 9)), data.draw(st.integers(-9, 9))
    times = data.draw(st.integers(0, 3))
    assert ragged.take(np.array(index, np.int64)).to_list() == [rows[i] for i in index]
    assert ragged.slice(start, stop).to_list() == rows[start:stop]
    assert ragged.repeat(times).to_list() == [row for row in rows for _ in range(times)]
    cut = data.draw(st.integers(0, len(rows)))
    parts = [ragged.slice(0, cut), ragged.slice(cut, len(rows))]
    assert Ragged.concat(parts).equals(ragged)


def test_rows_slices_and_runs_are_views():
    ragged = packed([[1, 2], [], [3, 4, 5], [6]])
    for part in (ragged[2], ragged.slice(1, 3).values, ragged.take(np.array([1, 2, 3])).values):
        assert np.shares_memory(part, ragged.values)
    assert ragged[-1].tolist() == [6]
    with pytest.raises(IndexError, match=r"row 4 is out of range.*with 4 rows"):
        ragged[4]


def test_a_mask_selects_rows():
    ragged = packed([[1], [2], [3]])
    assert ragged.take(np.array([True, False, True])).to_list() == [[1], [3]]
    with pytest.raises(ColumnError, match=r"mask of shape \(2,\) can't select from 3"):
        ragged.take(np.array([True, False]))


def test_values_change_while_rows_stay():
    ragged = packed([[1, 2], [], [3]])
    other = ragged.with_values(np.array([0.5, 1.5, 2.5], np.float32))
    assert other.to_list() == [[0.5, 1.5], [], [2.5]]
    assert other.dtype == np.float32
    with pytest.raises(ColumnError, match=r"rise from 0 to 2,.*from 0 to 3"):
        ragged.with_values(np.zeros(2))


def test_values_may_have_further_dims():
    ragged = Ragged(np.arange(12).reshape(4, 3), np.array([0, 1, 4]))
    assert ragged.take(np.array([1, 0])).values.shape == (4, 3)
    assert ragged[1].shape == (3, 3)


WIDE = st.lists(st.lists(st.lists(st.integers(-9, 9), min_size=2, max_size=2), max_size=4), max_size=6)  # fmt: skip


@calm
@given(WIDE, st.data())
def test_rows_of_pairs_are_those_of_lists(rows, data):
    ragged = Ragged.from_list(rows, np.int64, inner=(2,))
    assert ragged.inner == (2,)
    assert ragged.to_list() == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    assert ragged.sum().tolist() == [[sum(pair[k] for pair in row) for k in (0, 1)] for row in rows]
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    assert ragged.take(np.array(index, np.int64)).to_list() == [rows[i] for i in index]
    cut = data.draw(st.integers(0, len(rows)))
    parts = [ragged.slice(0, cut), ragged.slice(cut, len(rows))]
    assert Ragged.concat(parts).equals(ragged)


def test_empty_rows_take_the_inner_shape_of_the_others_or_the_one_that_is_given():
    assert Ragged.from_list([[], [[1, 2]], np.zeros(0, np.int64)]).inner == (2,)
    empty = Ragged.from_list([[], []], np.float32, inner=(3,))
    assert empty.values.shape == (0, 3)
    full = Ragged.from_list([[[1, 2, 3]]], np.float32)
    assert Ragged.concat([empty, full]).to_list() == [[], [], [[1, 2, 3]]]


def test_values_of_two_shapes_are_no_column():
    with pytest.raises(ColumnError, match=r"row 1 .* values of shape \[3\]; expected \[2\]"):
        Ragged.from_list([[[1, 2]], [[1, 2, 3]]])
    with pytest.raises(ColumnError, match=r"row 0 .* values of shape \[\]; expected \[2\]"):
        Ragged.from_list([[1]], inner=(2,))
    wide, flat = Ragged.from_list([[[1, 2]]]), Ragged.from_list([[1]])
    with pytest.raises(ColumnError, match=r"can't be concatenated: int64, int64\[2\]"):
        Ragged.concat([wide, flat])


def test_a_value_is_finite_where_all_its_numbers_are():
    ragged = Ragged.from_list([[[0, np.nan]], [], [[1, 2], [np.inf, 0]]], np.float32)
    assert ragged.finite_T().tolist() == [False, True, False]
    assert not ragged.finite()
    assert Ragged.from_list([[1, 2]]).finite_T().tolist() == [True, True]


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([[1], []], np.int64),
        ([[1.5], []], np.float64),
        ([np.zeros(0, np.float32)], np.float32),
        ([[True], []], np.bool_),
        ([[], np.ones(2, np.float32)], np.float32),
    ],
)
def test_the_dtype_is_what_the_values_ask_for(rows, dtype):
    assert Ragged.from_list(rows).dtype == dtype


def test_empty_rows_alone_have_no_dtype():
    with pytest.raises(ColumnError, match="pass dtype="):
        Ragged.from_list([[], []])
    assert Ragged.from_list([[], []], dtype=np.float32).lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("values", "offsets", "message"),
    [
        (np.zeros(3), [0, 2], "rise from 0 to 3,.*from 0 to 2"),
        (np.zeros(3), [1, 3], "go from 1 to 3"),
        (np.zeros(3), [0, 2, 1, 3], "fall in between"),
        (np.zeros(3), [0.0, 3.0], r"offsets must be an integer array \[N \+ 1\], not.*float64"),
        (np.array(["a"]), [0, 1], "can't have dtype <U1"),
        ([1, 2], [0, 2], "not list"),
        (np.array(1), [0, 1], "is the scalar 1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(values, offsets, message):
    with pytest.raises(ColumnError, match=message):
        Ragged(values, np.array(offsets))


@pytest.mark.parametrize(
    ("rows", "message"),
    [([1, 2], "row 0 .* is the scalar 1"), ([[1], ["x", []]], "row 1 .* is.*of numbers")],
)
def test_rows_that_are_no_rows_are_refused(rows, message):
    with pytest.raises(ColumnError, match=message):
        Ragged.from_list(rows)


def test_different_dtypes_are_not_concatenated():
    with pytest.raises(ColumnError, match="float32, int64"):
        Ragged.concat([packed([[1]]), Ragged.from_list([[1.0]], np.float32)])
    with pytest.raises(ColumnError, match="no ragged columns were given"):
        Ragged.concat([])


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_out_of_range_is_refused(index):
    with pytest.raises(ColumnError, match=f"index {index} is out of range for 3 rows"):
        packed([[1], [2], [3]]).take(np.array([0, index]))


def test_pickle_keeps_the_arrays_out_of_band():
    ragged = packed([[1, 2], [3]])
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(ragged, protocol=5, buffer_callback=buffers.append)
    again = pickle.loads(data, buffers=buffers)
    assert again.equals(ragged)
    assert np.shares_memory(again.values, ragged.values)
