"""The transport `cuda_ipc` on GPUs: the conformance suite, with real processes and IPC handles."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest
import torch

from dovetail.errors import ConfigError
from dovetail.interfaces import PluginContext
from dovetail_sdk.testing.transport_ends import (
    TransportEnd,
    TransportPlace,
    case_tensors,
    contents,
    manifest_of,
)
from dovetail_transports import conformance
from dovetail_transports.config import CudaIpcConfig
from dovetail_transports.cuda_ipc.cuda_memory import CudaMemory
from dovetail_transports.cuda_ipc.transport import CudaIpcTransport

GPUS = torch.cuda.device_count()
CONFIG = CudaIpcConfig(name="cuda_ipc", timeout=60.0)


@pytest.mark.gpu
class TestCudaIpc(conformance.TestOnOneGpu):
    """The suite, as `dovetail plugins check` runs it."""


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_processes_on_several_gpus_read_from_that_of_the_trainer(tmp_path: Path) -> None:
    place = TransportPlace(
        plugin=CudaIpcTransport,
        config=CONFIG,
        run_directory=tmp_path,
        device="cuda:1",
        receiver_devices=("cuda:0", "cuda:1"),
    )
    with (
        TransportEnd(place, "receiver", 0) as far,
        TransportEnd(place, "receiver", 1) as near,
        TransportEnd(place, "sender") as sender,
    ):
        for version, bucket_bytes in ((1, 300), (2, 1 << 20), (3, 64)):
            tensors = case_tensors(seed=version)
            manifest = attrs.evolve(manifest_of(tensors, version, bucket_bytes), receivers=2)
            receiving = [end.receive(manifest) for end in (far, near)]
            sender.send(manifest, seed=version).answer()
            assert [end.answer() for end in receiving] == [contents(iter(tensors.items()))] * 2


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_receivers_read_the_ring_where_it_is_and_it_is_freed(tmp_path: Path) -> None:
    device = torch.device("cuda:0")
    transport = CudaIpcTransport(CONFIG, PluginContext(run_directory=tmp_path, device="cuda:0"))
    tensors = {f"w{i}": torch.randn(1 << 22, device=device).bfloat16() for i in range(16)}
    manifest = manifest_of(tensors, bucket_bytes=32 << 20)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info(device)[0]
    sender, receiver = transport.sender(), transport.receiver()
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(sender.send, manifest, tensors.items())
        addresses = set()
        for name, tensor in receiver.receive(manifest):
            addresses.add(tensor.data_ptr())
            assert torch.equal(tensor, tensors[name])
        sending.result()
    assert len(addresses) == 8  # 16 tensors, in 4 buckets of 4, in 2 slots
    receiver.close()
    sender.close()
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info(device)[0] < 32 << 20


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_what_is_exported_does_not_depend_on_the_allocator_of_torch() -> None:
    """Memory from cudaMalloc is outside torch's pool, and its handle opens at its first byte."""
    memory = CudaMemory(torch.device("cuda:0"))
    reserved = torch.cuda.memory_reserved()
    made = memory.allocate(1 << 21)
    try:
        assert torch.cuda.memory_reserved() == reserved
        assert made.octets is not None
        assert made.octets.data_ptr() == made.address
        made.octets.fill_(7)
        assert made.octets.sum().item() == 7 << 21
    finally:
        memory.free(made)


def test_a_process_on_the_cpu_is_refused(tmp_path: Path) -> None:
    transport = CudaIpcTransport(CONFIG, PluginContext(run_directory=tmp_path, role="actor"))
    with pytest.raises(ConfigError, match=r"'actor'.* 'cpu'\n.*shared_memory"):
        transport.sender()
    with pytest.raises(ConfigError, match="'cpu'"):
        transport.receiver()
