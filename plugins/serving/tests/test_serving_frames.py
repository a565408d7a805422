"""Frames: a packed frame is unpacked unchanged, however it is split in transit; other bytes are refused."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.errors import RequestRefusedError, RolloutError
from dovetail.interfaces import FinishReason, SamplingParams
from dovetail_serving import SampleCall, SampleResult
from dovetail_serving.frames import Unpacker, pack, unpack
from dovetail_serving.messages import (
    calls_of,
    packed_calls,
    packed_error,
    packed_result,
    result_of,
)


@given(
    lengths=st.lists(st.integers(0, 5), max_size=4),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_frames_survive_any_cutting_of_their_bytes(lengths: list[int], cuts: list[int]) -> None:
    kinds = [np.int32, np.int64, np.float32, np.int32]
    arrays = [np.arange(length, dtype=kind) for length, kind in zip(lengths, kinds, strict=False)]
    data = pack({"number": 1, "text": "ü"}, arrays) + pack({"number": 2})
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    unpacker = Unpacker()
    frames = [f for a, b in itertools.pairwise(edges) for f in unpacker.feed(data[a:b])]
    assert [frame.header["number"] for frame in frames] == [1, 2]
    assert frames[0].header["text"] == "ü"
    assert not unpacker.unfinished
    for sent, came in zip(arrays, frames[0].arrays, strict=True):
        assert came.dtype == sent.dtype
        assert came.tolist() == sent.tolist()


@pytest.mark.parametrize(
    "data",
    [
        b"<html>502 Bad Gateway</html>",
        pack({"a": 1}) + pack({"a": 2}),
        pack({"a": 1})[:-1],
        pack({"a": 1}, [np.zeros(2, np.int32)]).replace(b"<i4", b"<i9"),
        pack({"a": 1}, [np.zeros(2, np.int32)]).replace(b'",2]', b'",1]'),
        pack({"a": 1}, [np.zeros(2, np.int32)]).replace(b'",2]', b'",3]'),
    ],
    ids=["html", "two", "cut", "dtype", "shorter", "longer"],
)
def test_what_is_not_one_frame_is_refused(data: bytes) -> None:
    with pytest.raises(RolloutError):
        unpack(data)


def test_calls_arrive_as_they_were_and_shared_prompts_travel_once() -> None:
    prompt = list(range(1000))
    drawn = SamplingParams(
        max_new_tokens=7, temperature=0.5, top_p=0.9, top_k=3, stop=("a", "b"), stop_token_ids=(4,)
    )
    greedy = SamplingParams(max_new_tokens=2, temperature=0.0, log_probs=True)
    calls = {
        f"n{i}": SampleCall(
            call_id=f"c{i}",
            prompt_ids=prompt,
            sampling=greedy if i % 2 else drawn,
            seed=2**62 + i,
            priority=i // 2,
        )
        for i in range(8)
    }
    data = packed_calls(calls)
    assert len(data) < 2 * 4 * len(prompt)
    arrived = calls_of(unpack(data))
    assert [call.call_id for call in arrived] == list(calls)
    for came, sent in zip(arrived, calls.values(), strict=True):
        assert attrs.asdict(came) == {**attrs.asdict(sent), "call_id": came.call_id}


ARRAYS = {
    "log_probs": np.array([-0.1, -20.0], np.float32),
    "raw_log_probs": np.array([-0.2, -30.0], np.float32),
    "weight_versions": np.array([2**33, 2**33 + 1]),
}


@pytest.mark.parametrize(
    "names", [[*some] for n in range(4) for some in itertools.combinations(ARRAYS, n)]
)
def test_a_sample_arrives_as_it_was(names: list[str]) -> None:
    given: Any = {name: ARRAYS[name] for name in names}
    sent = SampleResult(response_ids=np.array([5, 2**20]), finish_reason=FinishReason.STOP, **given)
    came = result_of(unpack(packed_result("n", sent)))
    assert isinstance(came, SampleResult)
    for name, expected in attrs.asdict(sent).items():
        found = getattr(came, name)
        if isinstance(expected, np.ndarray):
            assert found.dtype == expected.dtype
            assert found.tolist() == expected.tolist()
        else:
            assert found is expected


def test_a_failed_sample_arrives_as_its_error() -> None:
    came = result_of(unpack(packed_error("n", KeyError("which"))))
    assert isinstance(came, RolloutError)
    assert "KeyError: 'which'" in came.message


def test_a_refused_request_arrives_as_refused() -> None:
    came = result_of(unpack(packed_error("n", RequestRefusedError("too long"))))
    assert isinstance(came, RequestRefusedError)
    assert came.message == "too long"


@pytest.mark.parametrize(
    "header", [{}, {"finish": "stop"}, {"fields": ["response_ids"], "finish": "tired"}]
)
def test_a_sample_that_makes_no_sense_is_refused(header: dict[str, str]) -> None:
    with pytest.raises(RolloutError, match="can't be read"):
        result_of(unpack(pack(header, [np.zeros(1, np.int32)])))
