"""What the conformance suites need to know of these plugins: short waits, and the hardware that each needs."""

from __future__ import annotations

import pytest
import torch

from dovetail_sdk.testing.conformance import WeightTransportConformance
from dovetail_transports.config import CudaIpcConfig, NcclConfig, SharedMemoryConfig
from dovetail_transports.cuda_ipc.transport import CudaIpcTransport
from dovetail_transports.nccl.transport import NcclTransport
from dovetail_transports.shared_memory.transport import SharedMemoryTransport


class TestTwoBuckets(WeightTransportConformance):
    """Shared memory with the smallest ring."""

    plugin = SharedMemoryTransport
    config = SharedMemoryConfig(name="shared_memory", timeout=3.0)


class TestManyBuckets(WeightTransportConformance):
    """Shared memory with a ring that holds every bucket."""

    plugin = SharedMemoryTransport
    config = SharedMemoryConfig(name="shared_memory", timeout=3.0, buckets=32)

    def needs_processes(self) -> None:
        """Processes are tried with the smallest ring."""
        pytest.skip("tried with two buckets")


class TestOverGloo(WeightTransportConformance):
    """The transport `nccl`, whose buckets gloo carries between CPUs: NCCL itself wants a GPU for every end."""

    plugin = NcclTransport
    config = NcclConfig(name="nccl", timeout=3.0)


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA GPU")
class TestOnOneGpu(WeightTransportConformance):
    """CUDA IPC with both ends on one GPU."""

    plugin = CudaIpcTransport
    config = CudaIpcConfig(name="cuda_ipc", timeout=10.0)
    device = "cuda:0"
