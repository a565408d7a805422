"""The fused kernel gives the digests of the plain implementation bit for bit, since sender and receiver compare them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from dovetail_rollouts import DeferredDigests
from dovetail_rollouts.transports import tensor_digest as digest_module
from dovetail_rollouts.transports.tensor_digest import tensor_digests

BLOCK_BYTES = 4 * 65_536
SIZES = (0, 1, 2, 3, 4, 5, 8191, 8192, 8193, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 700_003)

INTERPRETED = f"""
import torch
from dovetail_rollouts.transports.word_sums import word_sums
from dovetail_rollouts.transports import tensor_digest as plain

generator = torch.Generator().manual_seed(0)
octets = torch.randint(0, 256, (1 << 20,), generator=generator, dtype=torch.uint8)
tensors = [octets[:size].clone() for size in {SIZES}]
tensors += [octets[3:1000], octets[16:48], torch.randn(300, 301).bfloat16(), torch.tensor(2.5)]
tensors += [torch.tensor([-1, -(2**31)], dtype=torch.int32)]
found = word_sums(tensors, plain._keys(torch.device("cpu")))
assert found.tolist() == [plain._word_sum(tensor).item() for tensor in tensors]
"""


@pytest.mark.vllm  # this environment has Triton
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_under_the_interpreter_of_triton() -> None:
    """In a process of its own, since Triton reads the environment variable when a kernel is defined."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerator_and_the_cpu_agree() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    if importlib.util.find_spec("triton") is not None:
        assert digest_module._kernel(device.type) is not None
    octets = torch.randint(0, 256, (1 << 22,), dtype=torch.uint8)
    here = [octets[:size].clone() for size in SIZES]
    here += [torch.randn(9 << 16), torch.randn(300, 301).bfloat16(), torch.tensor(2.5)]
    there = [tensor.to(device) for tensor in here]
    # Views that are not aligned to words, and tensors that are not contiguous.
    moved = octets.to(device)
    here += [octets[3:70_000], octets[6:], here[-2].t()]
    there += [moved[3:70_000], moved[6:], there[-2].t()]
    expected = tensor_digests(here)
    assert tensor_digests(there) == expected
    assert [tensor_digests([tensor])[0] for tensor in there] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_torch_operations_agree_where_the_kernel_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.accelerator.current_accelerator()
    tensors = [torch.randn(9 << 16), torch.randn(70_001), torch.arange(5)]
    monkeypatch.setattr(digest_module, "_kernel", lambda _: None)
    assert tensor_digests([tensor.to(device) for tensor in tensors]) == tensor_digests(tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_tensors_of_several_devices_come_in_order() -> None:
    device = torch.accelerator.current_accelerator()
    tensors = [torch.randn(count) for count in (3, 0, 70_000, 12)]
    deferred = DeferredDigests()
    for number, tensor in enumerate(tensors):
        deferred.add(tensor.to(device) if number % 3 else tensor)
    assert deferred.result() == tensor_digests(tensors)
