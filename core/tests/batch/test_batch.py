"""Batches: laws of split, concatenate, reorder and serialise, and errors that name the column."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from dovetail.batch import Batch, Column, Ragged
from dovetail.batch.columns import GLOSSARY, check_batch, glossary
from dovetail.errors import ColumnError

calm = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
"""For machines that others use as well."""
DTYPES = ("bool", "int64", "int32", "uint8", "float32", "float64", "float16")
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
)
JSON = (
    SCALARS
    | st.lists(SCALARS, max_size=2)
    | st.dictionaries(st.text(max_size=3), SCALARS, max_size=2)
)


@st.composite
def batches(draw, min_size: int = 0, max_size: int = 7) -> Batch:
    """A batch with columns of every kind."""
    count = draw(st.integers(min_size, max_size))
    columns: dict[str, object] = {}
    for number in range(draw(st.integers(0, 2))):
        shape = (count, *draw(st.lists(st.integers(0, 2), max_size=1)))
        columns[f"dense{number}"] = draw(hnp.arrays(draw(st.sampled_from(DTYPES)), shape))
    for number in range(draw(st.integers(0, 2))):
        lengths = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
        inner = draw(st.lists(st.integers(0, 3), max_size=2))
        values = draw(hnp.arrays(draw(st.sampled_from(DTYPES)), (sum(lengths), *inner)))
        columns[f"ragged{number}"] = Ragged(values, np.cumsum([0, *lengths]))
    if draw(st.booleans()):
        columns["object"] = draw(st.lists(JSON, min_size=count, max_size=count))
    return Batch(columns, length=count)  # type: ignore[arg-type]


@calm
@given(batches(), st.data())
def test_concat_undoes_split(batch, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch)), max_size=3)))
    sizes = np.diff([0, *cuts, len(batch)]).tolist()
    parts = batch.split(sizes)
    assert [len(part) for part in parts] == sizes
    assert Batch.concat(parts).equals(batch)


@calm
@given(batches(min_size=1), st.data())
def test_take_composes_and_a_permutation_can_be_undone(batch, data):
    indices = st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=9)
    first = np.array(data.draw(indices))
    second = np.array(data.draw(st.lists(st.integers(0, len(first) - 1), max_size=9)), np.int64)
    assert batch.take(first).take(second).equals(batch.take(first[second]))
    order = np.array(data.draw(st.permutations(range(len(batch)))))
    assert batch.take(order).take(np.argsort(order)).equals(batch)


@calm
@given(batches(), st.integers(0, 3))
def test_repeat_keeps_the_copies_together(batch, times):
    repeated = batch.repeat(times)
    assert len(repeated) == len(batch) * times
    for row in range(len(batch)):
        for copy in range(times):
            place = row * times + copy
            assert repeated.slice(place, place + 1).equals(batch.slice(row, row + 1))


@calm
@given(batches())
def test_pickle_restores_the_batch(batch):
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert pickle.loads(data, buffers=[bytes(b.raw()) for b in buffers]).equals(batch)
    assert pickle.loads(pickle.dumps(batch)).equals(batch)


def step() -> Batch:
    return Batch(
        {
            "group_id": np.array([3, 3, 4]),
            "scores": np.array([0.5, 1.0, 0.0], np.float32),
            "response_ids": Ragged.from_list([[1, 2], [3], [4, 5, 6]]),
            "finish_reason": ["stop", "length", "stop"],
        }
    )


def arrays_of(batch: Batch) -> list[np.ndarray]:
    response_ids = batch["response_ids"]
    return [batch["group_id"], batch["scores"], response_ids.values, response_ids.offsets]


def test_pickle_copies_no_array():
    batch = step()
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 4
    unpickled = pickle.loads(data, buffers=buffers)
    for before, pickled in zip(arrays_of(batch), arrays_of(unpickled), strict=True):
        assert np.shares_memory(before, pickled)


def test_contiguous_samples_are_views():
    batch = step()
    for part in (batch.slice(1, 3), batch.take([1, 2]), batch.split([1, 2])[1]):
        for small, whole in zip(arrays_of(part)[:3], arrays_of(batch)[:3], strict=True):
            assert np.shares_memory(small, whole)
    assert batch.slice(0, 3) is batch


def test_columns_are_selected_dropped_and_replaced():
    batch = step()
    assert batch.select(["scores", "group_id"]).names == ("scores", "group_id")
    assert batch.drop(["scores", "absent"]).names == ("group_id", "response_ids", "finish_reason")
    replaced = batch.with_columns({"scores": np.zeros(3, np.float32), "prompt_id": np.arange(3)})
    assert replaced["scores"].tolist() == [0, 0, 0]
    assert "prompt_id" in replaced
    assert "prompt_id" not in batch
    assert batch["scores"].tolist() == [0.5, 1.0, 0.0]
    assert len(batch.select([])) == 3
    assert repr(batch).startswith("Batch(3 samples; group_id: int64, scores: float32, ")
    with pytest.raises(TypeError):
        batch.columns["scores"] = np.zeros(3)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": np.zeros(2), "b": np.zeros(3)}, "'a' has 2, but 'b' has 3"),
        ({"a": [1], "b": Ragged.from_list([[1], [2]])}, "'a' has 1, but 'b' has 2"),
        ({"a": np.array(["x"])}, "column 'a' can't have dtype <U1.*\n.*object column"),
        ({"a": np.array([object()])}, "column 'a' can't.*dtype object"),
        ({"a": np.array(["2020-01-01"], "datetime64[D]")}, "can't have dtype datetime64"),
        ({"a": 3}, "column 'a' must.*not int"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns, message):
    with pytest.raises(ColumnError, match=message):
        Batch(columns)


def test_a_missing_column_names_the_nearest_and_who_needs_it():
    batch = step()
    with pytest.raises(ColumnError, match=r"no column 'score'.*\n.*did you mean 'scores'"):
        batch["score"]
    with pytest.raises(
        ColumnError,
        match=r"the loss needs 'advantages', 'respons_ids', which the batch lacks.*\n.*'response_ids'",
    ):
        batch.require(["scores", "advantages", "respons_ids"], "the loss")
    batch.require(["scores"], "the loss")


def test_batches_of_different_columns_are_not_concatenated():
    batch = step()
    with pytest.raises(ColumnError, match=r"0 and 1 can't be concatenated.*'scores'"):
        Batch.concat([batch, batch.drop(["scores"])])
    with pytest.raises(ColumnError, match=r"'scores' can't.*float32 and float64"):
        Batch.concat([batch, batch.with_columns({"scores": np.zeros(3)})])
    with pytest.raises(ColumnError, match=r"'scores'.*float32.*object"):
        Batch.concat([batch, batch.with_columns({"scores": [1, 2, 3]})])
    with pytest.raises(ColumnError, match="no batches were given"):
        Batch.concat([])
    with pytest.raises(ColumnError, match=r"sizes .1, 1. add up to 2;.*its 3 samples"):
        batch.split([1, 1])


def test_the_glossary_checks_names_dtypes_shapes_and_lengths():
    check_batch(step())
    wrong = step().with_columns(
        {
            "group_id": np.zeros(3, np.int32),
            "scores": Ragged.from_list([[0.5]] * 3, np.float32),
            "log_prob": np.zeros(3),
            "log_probs": Ragged.from_list([[0, 0], [0, 0], [0, 0]], np.float32),
            "advantages": np.zeros(3, np.float32),
            "returns": [1, 2, 3],
        }
    )
    with pytest.raises(ColumnError) as caught:
        check_batch(wrong)
    message = str(caught.value)
    assert "'group_id' has dtype int32, not int64" in message
    assert "'scores' is ragged" in message
    assert "'log_prob' is unknown (nearest: 'log_probs')" in message
    assert "'log_probs' has 2 values in row 1, but 'response_ids' has 1" in message
    assert "'returns' is object" in message
    assert "advantages" not in message


def test_a_plugin_extends_the_glossary_but_redefines_nothing():
    own = Column("mine.depth", "int64", "ragged", "depth of the tree", "mine", "response_ids")
    batch = step().with_columns({"mine.depth": Ragged.from_list([[0, 1], [0], [0, 1, 2]])})
    check_batch(batch, glossary([own]))
    with pytest.raises(ColumnError, match=r"'mine\.depth' is unknown"):
        check_batch(batch)
    with pytest.raises(ColumnError, match="'scores' is declared as int64"):
        glossary([Column("scores", "int64", "dense", "", "mine")])
    assert all(c.along in {None, "response_ids"} for c in GLOSSARY.values())


def heads(batch: Batch, size: int = 3) -> Ragged:
    """Float32 [T, size] along the responses."""
    rows = batch["response_ids"]
    return rows.with_values(np.zeros((rows.total, size), np.float32))


@pytest.mark.parametrize("inner", [(3,), [3], (None,)])
def test_the_glossary_checks_the_inner_shape_of_a_column(inner):
    own = Column("mine.heads", "float32", "ragged", "", "mine", "response_ids", inner)
    check_batch(step().with_columns({"mine.heads": heads(step())}), glossary([own]))
    expected = r"not \[T, \?\]" if inner == (None,) else r"not \[T, 3\]"
    flat = step()["response_ids"].with_values(np.zeros(6, np.float32))
    with pytest.raises(ColumnError, match=rf"'mine\.heads' has shape \[T\], {expected}"):
        check_batch(step().with_columns({"mine.heads": flat}), glossary([own]))
    if inner != (None,):
        with pytest.raises(ColumnError, match=rf"'mine\.heads' has shape \[T, 2\], {expected}"):
            check_batch(step().with_columns({"mine.heads": heads(step(), 2)}), glossary([own]))
    short = Ragged.from_list([[], [[1, 2, 3]], []], np.float32)
    with pytest.raises(ColumnError, match="has 0 values in row 0, but 'response_ids' has 2"):
        check_batch(step().with_columns({"mine.heads": short}), glossary([own]))


def test_a_dense_column_may_have_an_inner_shape():
    own = Column("mine.pair", "float32", "dense", "", "mine", inner=(2,))
    check_batch(step().with_columns({"mine.pair": np.zeros((3, 2), np.float32)}), glossary([own]))
    with pytest.raises(ColumnError, match=r"'mine\.pair' has shape \[3\], not \[3, 2\]"):
        check_batch(step().with_columns({"mine.pair": np.zeros(3, np.float32)}), glossary([own]))


def test_two_inner_shapes_of_one_column_do_not_agree():
    one = Column("mine.heads", "float32", "ragged", "", "one", inner=(3,))
    other = Column("mine.heads", "float32", "ragged", "", "other", inner=(None,))
    assert glossary([one, one])["mine.heads"] is one
    with pytest.raises(
        ColumnError,
        match=r"declared as float32 ragged \[T, \?\] by.*as float32 ragged \[T, 3\] by one",
    ):
        glossary([one, other])


@pytest.mark.parametrize(
    ("shape", "inner"), [("ragged", (0,)), ("dense", (-1,)), ("ragged", ("K",)), ("object", (2,))]
)
def test_an_inner_shape_that_no_column_can_have_is_refused(shape, inner):
    dtype = "object" if shape == "object" else "float32"
    with pytest.raises(ColumnError, match=r"'mine\.x' has inner = "):
        Column("mine.x", dtype, shape, "", "mine", inner=inner)


@pytest.mark.parametrize(
    ("dtype", "shape", "facts"),
    [
        ("float32", "sample", ["'bonus'", "shape = 'sample'", "'dense'"]),
        ("float", "dense", ["'bonus'", "dtype = 'float'", "'float32'"]),
    ],
)
def test_a_column_of_no_known_dtype_or_shape_is_refused(
    dtype: str, shape: Any, facts: list[str]
) -> None:
    with pytest.raises(ColumnError) as caught:
        Column("bonus", dtype, shape, "a bonus", "stage")
    assert [fact for fact in facts if fact not in str(caught.value)] == []


def test_a_batch_is_not_iterated_since_its_length_is_that_of_samples():
    batch = Batch({"scores": np.zeros(2, np.float32)})
    with pytest.raises(TypeError, match="not iterable"):
        list(batch)
    assert list(batch.names) == ["scores"]
