"""The tensor digest: any flipped bit and any exchanged words change it; shape, dtype and the division into blocks do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dovetail_rollouts.transports import tensor_digest as digest_module
from dovetail_rollouts.transports.tensor_digest import tensor_digests


def of(tensor: torch.Tensor) -> int:
    return tensor_digests([tensor])[0]


def as_bytes(data: bytes | bytearray) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytes(data), dtype=np.uint8).copy())


@given(data=st.binary(min_size=1, max_size=200), where=st.integers(0, 10**6))
def test_one_flipped_bit_changes_it(data: bytes, where: int) -> None:
    changed = bytearray(data)
    bit = where % (8 * len(data))
    changed[bit // 8] ^= 1 << (bit % 8)
    assert of(as_bytes(data)) != of(as_bytes(changed))


@given(
    words=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=40, unique=True), data=st.data()
)
def test_exchanged_words_change_it(words: list[int], data) -> None:
    i, j = data.draw(
        st.tuples(*[st.integers(0, len(words) - 1)] * 2).filter(lambda pair: pair[0] != pair[1])
    )
    swapped = list(words)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    assert of(torch.tensor(words)) != of(torch.tensor(swapped))


def test_exchanged_signs_and_blocks_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3 * (1 << 16) + 5)
    x[7] = -1
    y = torch.ones_like(x)
    for place in (8, 7 + (1 << 16), 7 + 2 * (1 << 16), len(x) - 1):
        y.fill_(1)[place] = -1
        assert of(x) != of(y)


@given(data=st.binary(max_size=64), zeros=st.integers(1, 9))
def test_trailing_zeros_change_it(data: bytes, zeros: int) -> None:
    assert of(as_bytes(data)) != of(as_bytes(data + bytes(zeros)))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("count", [0, 1, 3, 65_537, 200_001])
def test_it_depends_on_the_bytes_alone(dtype: torch.dtype, count: int) -> None:
    tensor = torch.randn(count).to(dtype)
    octets = tensor.reshape(-1).view(torch.uint8)
    assert of(tensor) == of(octets) == of(tensor.view(1, -1)) == of(tensor.clone())


def test_views_off_word_boundaries_and_transposed_tensors() -> None:
    base = torch.randn(11, 5).bfloat16()
    assert of(base[1:].reshape(-1)[1:]) == of(base[1:].reshape(-1)[1:].clone())
    assert of(base.t()) == of(base.t().contiguous()) != of(base)


def test_a_list_gives_the_digests_of_its_members() -> None:
    tensors = [torch.randn(n) for n in (1, 10, 100_000)]
    assert tensor_digests(tensors) == [of(t) for t in tensors]
    assert tensor_digests([]) == []


def finalised(x: int) -> int:
    """The finaliser of SplitMix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_it_is_the_sum_that_its_docstring_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with plain Python integers, over several blocks."""
    monkeypatch.setattr(digest_module, "_BLOCK", 4)
    digest_module._keys.cache_clear()
    words = [(i * 2654435761) % 2**32 for i in range(11)]
    signed = [w - 2**32 if w >= 2**31 else w for w in words]

    def mix(x: int) -> int:
        return finalised((x * 0x9E3779B97F4A7C15) % 2**64)

    total = 0
    for block in range(3):
        part = sum(w * (mix(i + 1) | 1) for i, w in enumerate(signed[4 * block : 4 * block + 4]))
        total += mix(part % 2**64 ^ mix(block + 1))
    expected = finalised((total + 44 * 0x9E3779B97F4A7C15) % 2**64)
    try:
        assert of(torch.tensor(signed, dtype=torch.int32)) == expected
    finally:
        digest_module._keys.cache_clear()


def test_threads_change_nothing() -> None:
    tensor = torch.randn(40 << 16)
    threads = torch.get_num_threads()
    try:
        found = set()
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.add(of(tensor))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


def test_deferred_digests_come_in_the_order_of_their_tensors() -> None:
    tensors = [torch.randn(n) for n in (3, 0, 70_000)]
    deferred = digest_module.DeferredDigests()
    assert deferred.result() == []
    for tensor in tensors:
        deferred.add(tensor)
    assert deferred.result() == [of(tensor) for tensor in tensors]
