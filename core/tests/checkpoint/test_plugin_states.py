"""Plugins' states come back from a checkpoint as they were, arrays bit for bit, or are refused with their place."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from hypothesis.extra import numpy as arrays_of

from dovetail.checkpoint.plugin_states import ARRAYS, DTYPES, read_states, write_states
from dovetail.checkpoint.store import CheckpointStore
from dovetail.errors import CheckpointError
from dovetail_sdk.testing import resumed_state


class Holder:
    """A plugin whose state is what it was made with."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state(self) -> Any:
        return self._state


def resumed(state: Any) -> dict[str, Any]:
    with TemporaryDirectory() as directory:
        return resumed_state(Holder(state), Path(directory))


def is_numpy(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic)


def assert_same(read: Any, written: Any) -> None:
    """Equal with types and bits; tuples come back as lists."""
    if is_numpy(written):
        assert type(read) is type(written)
        assert read.dtype == written.dtype.newbyteorder("=")
        assert read.shape == written.shape
        assert read.tobytes() == written.astype(written.dtype.newbyteorder("=")).tobytes()
    elif isinstance(written, dict):
        assert type(read) is dict
        assert list(read) == list(written)
        for key, value in written.items():
            assert_same(read[key], value)
    elif isinstance(written, list | tuple):
        assert type(read) is list
        for one, other in zip(read, written, strict=True):
            assert_same(one, other)
    elif isinstance(written, float):
        assert type(read) is float
        assert math.isnan(written) if math.isnan(read) else read.hex() == written.hex()
    else:
        assert type(read) is type(written)
        assert read == written


LOOK_ALIKES = ["float32 [2] in state.safetensors", '["plugin", "a"]', "scalars", "__metadata__"]
TEXTS = st.sampled_from(LOOK_ALIKES) | st.text(max_size=8)
NUMPY_DTYPES = st.sampled_from(DTYPES).flatmap(
    lambda name: st.sampled_from([np.dtype(name), np.dtype(name).newbyteorder(">")])
)


@st.composite
def bit_patterns(draw: st.DrawFn) -> Any:
    """Arrays and scalars of any bits, also of NaNs, in either byte order, contiguous or not."""
    dtype, shape = draw(NUMPY_DTYPES), draw(arrays_of.array_shapes(min_dims=0, min_side=0))
    size = math.prod(shape) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    if dtype.kind == "b":
        data = data % 2
    array = data.view(dtype).reshape(shape)
    form = draw(st.sampled_from(["plain", "transposed", "reversed", "scalar"]))
    if form == "scalar" and array.size:
        return array.reshape(-1)[0]
    if form == "reversed" and array.ndim:
        return array[::-1]
    return array.T if form == "transposed" else array


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | bit_patterns()
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXTS, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, NESTED, max_size=4))
@example({text: {text: [text, np.zeros(2, np.float32)]} for text in LOOK_ALIKES})
def test_a_state_comes_back_as_it_was(state: dict[str, Any]) -> None:
    assert_same(resumed(state), state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3)])
def test_arrays_of_every_dtype_and_shape_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    assert_same(resumed({"array": array})["array"], array)


def test_the_payload_of_a_nan_comes_back() -> None:
    signaling = struct.pack("<IQ", 0x7F800001, 0xFFF0000000000BAD)
    single, double = np.frombuffer(signaling[:4], "<f4"), np.frombuffer(signaling[4:], "<f8")
    read = resumed({"single": single, "double": double, "big": double.astype(">f8")})
    assert read["single"].view(np.uint32)[0] == 0x7F800001
    assert read["double"].view(np.uint64)[0] == 0xFFF0000000000BAD
    assert read["big"].view(np.uint64)[0] == 0xFFF0000000000BAD


def test_arrays_that_come_back_can_be_written_to() -> None:
    read = resumed({"counts": np.arange(3), "total": np.array(4.0), "none": np.zeros((0, 2))})
    read["counts"] += 1
    read["total"] += 0.5
    read["none"] += 1
    assert read["counts"].tolist() == [1, 2, 3]
    assert read["total"] == 4.5


def test_scalars_and_arrays_without_axes_are_told_apart() -> None:
    read = resumed({"scalar": np.float32(0.1), "array": np.array(0.1, np.float32)})
    assert type(read["scalar"]) is np.float32
    assert type(read["array"]) is np.ndarray


def test_states_of_several_plugins_stay_apart(tmp_path: Path) -> None:
    plugins = {name: Holder({"a": np.full(2, n)}) for n, name in enumerate(("one", "two", "a.b"))}
    states = read_states(tmp_path, json.loads(json.dumps(write_states(tmp_path, plugins))))
    assert {name: state["a"].tolist() for name, state in states.items()} == {
        "one": [0, 0],
        "two": [1, 1],
        "a.b": [2, 2],
    }


def test_without_arrays_there_is_no_file_of_them(tmp_path: Path) -> None:
    state = {"factor": 0.5, "seen": [1, None, "x"]}
    assert write_states(tmp_path, {"kl_controller": Holder(state)}) == {"kl_controller": state}
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_arrays_names_them_by_their_path(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    write_states(tmp_path, {"estimator": Holder({"baselines": [None, np.arange(2)]})})
    stored = load_file(tmp_path / ARRAYS)
    assert [json.loads(name) for name in stored] == [["estimator", "baselines", 1]]


class Masks(np.ndarray):
    """A subclass, whose own attributes no file would keep."""


CONTAINS_ITSELF: dict[str, Any] = {}
CONTAINS_ITSELF["again"] = CONTAINS_ITSELF


@pytest.mark.parametrize(
    ("state", "facts"),
    [
        ({"a": [0, {"b": {1, 2}}]}, ["state()['a'][1]['b']", "set"]),
        ({"a": b"raw"}, ["state()['a']", "bytes"]),
        ({"a": (1, object())}, ["state()['a'][1]", "object"]),
        ({"a": {"b": {3: "x"}}}, ["state()['a']['b']", "3", "int", "string"]),
        ({None: 1}, ["state() ", "None", "NoneType"]),
        ({"a": np.zeros(2, np.complex64)}, ["state()['a']", "ndarray", "complex64", "float32"]),
        ({"a": np.complex128(1j)}, ["state()['a']", "complex128"]),
        ({"a": np.array(["x", None])}, ["state()['a']", "object"]),
        ({"a": np.array(["text"])}, ["state()['a']", "<U4"]),
        ({"a": np.zeros(2, "M8[s]")}, ["state()['a']", "datetime64[s]"]),
        ({"a": np.zeros(2, [("x", "f4")])}, ["state()['a']", "'x'"]),
        ({"a": np.zeros(2).view(Masks)}, ["state()['a']", "Masks"]),
        ({"a": np.ma.masked_array([1.0, 2.0], [True, False])}, ["state()['a']", "MaskedArray"]),
        ([1, 2], ["state() is a list", "mapping"]),
        (None, ["state() is a NoneType", "mapping"]),
        (CONTAINS_ITSELF, ["contains itself"]),
    ],
)
def test_what_cannot_be_kept_is_refused_and_leaves_nothing(
    tmp_path: Path, state: Any, facts: list[str]
) -> None:
    store = CheckpointStore(tmp_path)
    earlier = store.save(1, lambda directory: (directory / "state.json").touch())
    plugins = {"estimator": Holder({"a": np.zeros(2)}), "reward_manager": Holder(state)}
    with pytest.raises(CheckpointError) as caught:
        store.save(2, lambda directory: write_states(directory, plugins))
    for fact in ["reward_manager", "Holder", *facts]:
        assert fact in str(caught.value)
    assert store.latest() == earlier
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1"]


@pytest.mark.skipif(not hasattr(np, "float128"), reason="this machine has no float128")
def test_floats_longer_than_64_bits_are_refused() -> None:
    with pytest.raises(CheckpointError, match="float128"):
        resumed({"a": np.longdouble(1)})


def test_tensors_of_torch_are_refused_by_their_type() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(CheckpointError, match=r"state\(\)\['a'\] is a torch\.Tensor"):
        resumed({"a": torch.zeros(2)})


@pytest.mark.parametrize("damage", ["missing", "shorter", "changed"])
def test_a_damaged_file_of_arrays_is_found(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    plugins = {"estimator": Holder({"a": np.arange(4)})}
    path = store.save(1, lambda directory: write_states(directory, plugins))
    store.verify(path)
    data = (path / ARRAYS).read_bytes()
    (path / ARRAYS).unlink()
    if damage != "missing":
        changed = data[:-1] if damage == "shorter" else data[:-1] + b"\x01"
        (path / ARRAYS).write_bytes(changed)
    with pytest.raises(CheckpointError, match=ARRAYS):
        store.verify(path)
