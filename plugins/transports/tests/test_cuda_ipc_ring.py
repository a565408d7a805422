"""The ring of `cuda_ipc` on any machine: its protocol over host memory, which is opened by a handle as GPU memory is.

Only the tests on a GPU cover CUDA itself: handles, peer access, streams.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces import PluginContext
from dovetail_sdk.testing.conformance import WeightTransportConformance
from dovetail_sdk.testing.transport_ends import contents, manifest_of
from dovetail_transports.config import CudaIpcConfig
from dovetail_transports.cuda_ipc.cuda_memory import Allocation, CudaMemory
from dovetail_transports.cuda_ipc.transport import CudaIpcTransport

NO_PROCESSES = "CUDA's part needs a GPU; the protocol between processes is that of shared_memory"


class HostMemory(CudaMemory):
    """Host memory in place of GPU memory.

    Args:
        identity: the GPU that the memory stands for.
    """

    held: ClassVar[dict[bytes, Tensor]] = {}
    events: ClassVar[list[str]] = []
    largest = 1 << 40

    def __init__(self, identity: str) -> None:
        self._identity = identity

    @property
    def identity(self) -> str:
        return self._identity

    def allocate(self, size: int) -> Allocation:
        if size > self.largest:
            raise WeightSyncError(f"{size} bytes can't be had")
        handle = secrets.token_bytes(8)
        self.held[handle] = torch.empty(size, dtype=torch.uint8)
        self.events.append("allocate")
        return Allocation(address=0, size=size, octets=self.held[handle], handle=handle)

    def free(self, made: Allocation) -> None:
        self.held.pop(made.handle).zero_()
        self.events.append("free")

    def open(self, handle: bytes, size: int, identity: str) -> Allocation:
        self.events.append("open")
        assert len(self.held[handle]) == size
        octets = self.held[handle] if identity == self._identity else None
        return Allocation(address=0, size=size, octets=octets, handle=handle)

    def shut(self, opened: Allocation) -> None:
        self.events.append("shut")

    def staging(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def fetch(self, target: Tensor, source: Allocation, offset: int) -> None:
        target.copy_(self.held[source.handle].narrow(0, offset, len(target)))


class OnOneDevice(CudaIpcTransport):
    """A transport whose trainer and rollouts share a device."""

    def memory(self, device: torch.device) -> CudaMemory:
        return HostMemory("GPU-a")


class OnTwoDevices(CudaIpcTransport):
    """A transport whose rollouts are on another device than the trainer."""

    def sender_slots(self):
        self.gpu = "GPU-a"
        return super().sender_slots()

    def receiver_slots(self):
        self.gpu = "GPU-b"
        return super().receiver_slots()

    def memory(self, device: torch.device) -> CudaMemory:
        return HostMemory(self.gpu)


class TestRingOnOneDevice(WeightTransportConformance):
    plugin = OnOneDevice
    config = CudaIpcConfig(name="cuda_ipc")

    def needs_processes(self) -> None:
        pytest.skip(NO_PROCESSES)


class TestRingOnTwoDevices(WeightTransportConformance):
    plugin = OnTwoDevices
    config = CudaIpcConfig(name="cuda_ipc", buckets=3)

    def needs_processes(self) -> None:
        pytest.skip(NO_PROCESSES)


@pytest.fixture(params=[OnOneDevice, OnTwoDevices])
def transport(request, meetings) -> Iterator[CudaIpcTransport]:
    HostMemory.events.clear()
    config = CudaIpcConfig(name="cuda_ipc", timeout=60.0, directory=str(meetings), channel="test")
    yield request.param(config, PluginContext())
    assert not HostMemory.held


def test_the_ring_is_exported_and_opened_once_and_freed_when_a_larger_one_is_open(
    transport,
) -> None:
    sender, receiver = transport.sender(), transport.receiver()
    with ThreadPoolExecutor(1) as thread:
        for version, size in ((1, 10), (2, 10), (3, 100_000), (4, 10)):
            tensors = {"w": torch.arange(size) + version}
            manifest = manifest_of(tensors, version, bucket_bytes=64)
            sending = thread.submit(sender.send, manifest, tensors.items())
            assert contents(receiver.receive(manifest)) == contents(iter(tensors.items()))
            sending.result()
    # The receiver closes the first ring before the sender frees it.
    assert HostMemory.events == ["allocate", "open", "allocate", "shut", "open", "free"]
    receiver.close()
    sender.close()
    assert HostMemory.events[6:] == ["shut", "free"]


def test_without_memory_for_the_ring_both_sides_hear_of_it(
    transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostMemory, "largest", 1000)
    sender, receiver = transport.sender(), transport.receiver()
    tensors = {"w": torch.arange(10)}
    manifest = manifest_of(tensors)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(sender.send, manifest, tensors.items())
        with pytest.raises(WeightSyncError, match=r"sender .* 8192 bytes"):
            list(receiver.receive(manifest))
        with pytest.raises(WeightSyncError, match="8192 bytes"):
            sending.result()
    receiver.close()
    sender.close()
