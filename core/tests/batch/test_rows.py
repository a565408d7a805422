"""Rows of other columns: they behave as the Ragged that they stand for, and read nothing before they must."""

from __future__ import annotations

import gc
import pickle
import weakref

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from dovetail.batch import Batch, Ragged, RaggedRows, StoredArray
from dovetail.batch.columns import check_batch
from dovetail.batch.partition import token_counts
from dovetail.errors import ColumnError

calm = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])


class Shelf:
    """A store in this process that counts what is read."""

    def __init__(self):
        self.arrays: list[np.ndarray] = []
        self.reads: list[list[int]] = []

    def put(self, arrays):
        self.arrays += [array.copy() for array in arrays]
        return range(len(self.arrays))[-len(arrays) :]

    def get(self, references):
        self.reads.append(list(references))
        return [self.arrays[reference] for reference in references]


def remote(shelf: Shelf, column: Ragged) -> RaggedRows:
    (stored,) = StoredArray.put(shelf, [column.values])
    return RaggedRows.stored(stored, column.offsets)


@st.composite
def columns(draw, dtype: str, inner: tuple[int, ...] = ()) -> Ragged:
    lengths = draw(st.lists(st.integers(0, 4), max_size=6))
    values = draw(hnp.arrays(dtype, (sum(lengths), *inner)))
    return Ragged(values, np.cumsum([0, *lengths]))


@calm
@given(st.data())
def test_any_chain_of_selections_equals_that_of_plain_columns_and_reads_nothing(data):
    dtype = data.draw(st.sampled_from(["bool", "int64", "float32", "float64"]))
    shelf = Shelf()
    pool: list[tuple[Ragged, Ragged]] = []
    inner = data.draw(st.sampled_from([(), (3,), (2, 2)]))
    for column in data.draw(st.lists(columns(dtype, inner), min_size=1, max_size=3)):
        pool.append((column, remote(shelf, column) if data.draw(st.booleans()) else column))
    for _ in range(data.draw(st.integers(1, 5))):
        plain, lazy = data.draw(st.sampled_from(pool))
        kind = data.draw(st.sampled_from(["take", "slice", "concat", "repeat"]))
        if kind == "concat":
            other, lazy_other = data.draw(st.sampled_from(pool))
            pool.append((Ragged.concat([plain, other]), RaggedRows.join([lazy, lazy_other])))
        elif kind == "take":
            rows = data.draw(st.lists(st.integers(0, len(plain) - 1))) if len(plain) else []
            index = np.array(rows, np.int64)
            pool.append((plain.take(index), RaggedRows.of(lazy).take(index)))
        elif kind == "slice":
            start, stop = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6))
            pool.append((plain.slice(start, stop), RaggedRows.of(lazy).slice(start, stop)))
        else:
            pool.append((plain.repeat(2), RaggedRows.of(lazy).repeat(2)))
    assert not shelf.reads
    for plain, lazy in pool:
        assert lazy.dtype == plain.dtype
        assert lazy.total == plain.total
        assert lazy.nbytes == plain.nbytes
        assert np.array_equal(lazy.offsets, plain.offsets)
        assert lazy.equals(plain)
        assert plain.equals(lazy)
        assert lazy.finite() == plain.finite()
        assert pickle.loads(pickle.dumps(lazy, protocol=5)).equals(plain)
        for row, expected in zip(lazy, plain, strict=True):
            assert np.array_equal(row, expected, equal_nan=dtype.startswith("float"))


@pytest.mark.parametrize("longest", [3, 400])
@pytest.mark.parametrize("inner", [(), (2,)])
def test_short_and_long_rows_of_several_sources_are_gathered_alike(longest, inner):
    rng, shelf = np.random.default_rng(longest), Shelf()
    plain, lazy = [], []
    for _ in range(3):
        offsets = np.cumsum([0, *rng.integers(0, longest + 1, 20)])
        plain.append(Ragged(rng.random((offsets[-1], *inner)).astype(np.float32), offsets))
        lazy.append(remote(shelf, plain[-1]))
    for rows in (rng.permutation(60), rng.integers(0, 20, 50), np.arange(10, 50)):
        expected = Ragged.concat(plain).take(rows)
        found = RaggedRows.join(lazy).take(rows)
        assert found.equals(expected)
        assert found.inner == inner


def test_rows_that_lie_together_are_a_view_of_the_store():
    shelf = Shelf()
    column = remote(shelf, Ragged(np.arange(10), np.array([0, 3, 3, 7, 10])))
    together = column.take(np.array([3, 0, 1, 2])).take(np.array([1, 2, 3]))
    assert np.shares_memory(together.values, shelf.arrays[0])
    assert together.to_list() == [[0, 1, 2], [], [3, 4, 5, 6]]
    assert not np.shares_memory(column.take(np.array([2, 0])).values, shelf.arrays[0])


def test_values_are_fetched_once_and_several_sources_together():
    shelf = Shelf()
    joined = RaggedRows.join([remote(shelf, Ragged(np.arange(3), np.array([0, 1, 3])))] * 2)
    assert len(joined.sources) == 1
    assert not joined.fetched
    joined = RaggedRows.join(
        [joined, remote(shelf, Ragged(np.arange(3, 6), np.array([0, 3]))), Ragged.from_list([[9]])]
    )
    assert joined.values.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 9]
    assert joined.values is joined.values
    assert joined.fetched
    assert joined.take(np.array([4, 1])).to_list() == [[3, 4, 5], [1, 2]]
    assert [sorted(read) for read in shelf.reads] == [[0, 1]]


def test_what_no_row_needs_is_neither_fetched_nor_kept():
    shelf = Shelf()
    first, second = (Ragged(np.arange(4) + i, np.array([0, 4, 4])) for i in (0, 10))
    lazy = [remote(shelf, first), remote(shelf, second)]
    joined = RaggedRows.join(lazy)
    gone = weakref.ref(joined.sources[1])
    empty, kept = joined.take(np.array([1, 3])), joined.take(np.array([1, 0]))
    assert empty.values.dtype == np.int64
    assert not shelf.reads
    del joined, lazy, empty
    gc.collect()
    assert gone() is None
    assert kept.to_list() == [[], [0, 1, 2, 3]]
    assert shelf.reads == [[0]]


def test_a_batch_of_stored_columns_is_selected_joined_counted_and_checked_without_reading():
    shelf = Shelf()
    ids = Ragged(np.arange(6), np.array([0, 2, 3, 6]))
    plain = Batch(
        {
            "prompt_ids": ids,
            "old_log_probs": ids.with_values(-np.arange(6, dtype=np.float32)),
            "response_ids": ids.with_values(np.arange(6)[::-1].copy()),
            "sample_id": ["a", "b", "c"],
        }
    )
    lazy = plain.with_columns(
        {
            name: remote(shelf, column)
            for name, column in plain.columns.items()
            if name != "sample_id"
        }
    )
    assert token_counts(lazy).tolist() == [4, 2, 6]
    check_batch(lazy)
    assert lazy["old_log_probs"].finite()
    moved = Batch.concat([lazy.take([2, 0]), plain.slice(1, 2), lazy.repeat(2)])
    moved = moved.drop(["prompt_ids"]).select(["response_ids", "old_log_probs"]).take([0, 2, 6])
    assert "not read" not in repr(moved)
    assert not shelf.reads
    expected = Batch.concat([plain.take([2, 0]), plain.slice(1, 2), plain.repeat(2)])
    expected = expected.select(["response_ids", "old_log_probs"]).take([0, 2, 6])
    assert moved.equals(expected)
    assert pickle.loads(pickle.dumps(lazy)).equals(plain)
    assert type(pickle.loads(pickle.dumps(lazy["prompt_ids"]))) is Ragged
    assert lazy["old_log_probs"].sum().tolist() == plain["old_log_probs"].sum().tolist()


def test_what_is_known_of_a_chunk_is_not_believed_of_others():
    shelf = Shelf()
    good = Ragged(np.array([1.0, 2.0], np.float32), np.array([0, 1, 2]))
    bad = Ragged(np.array([1.0, np.nan], np.float32), np.array([0, 1, 2]))
    joined = RaggedRows.join([remote(shelf, good), remote(shelf, bad)])
    assert not joined.finite()
    assert joined.take(np.array([2, 0])).finite()  # the row beside the NaN
    assert not joined.take(np.array([3])).finite()


def test_a_locked_selection_refuses_writing_and_leaves_the_original_free():
    column = Ragged(np.arange(4), np.array([0, 1, 4]))
    rows = RaggedRows.of(column).take(np.array([1, 0]))
    with pytest.raises(ValueError, match="read-only"):
        rows.read_only().values[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        column.read_only().values[0] = 9
    rows.values[0] = 9
    column.values[3] = 7
    assert column.values.tolist() == [0, 1, 2, 7]


def test_columns_of_different_dtypes_are_refused():
    one = RaggedRows.of(Ragged.from_list([[1]]))
    with pytest.raises(ColumnError, match="float64, int64"):
        RaggedRows.join([one, Ragged.from_list([[1.0]])])
    with pytest.raises(AttributeError, match="nothing"):
        _ = one.nothing
