"""Conformance suites of the transports, with the ring and the hardware that each needs."""

from __future__ import annotations

import pytest
import torch

from dovetail_sdk.testing.conformance import WeightTransportConformance
from dovetail_transports.config import SharedMemoryConfig
from dovetail_transports.cuda_ipc.transport import CudaIpcTransport
from dovetail_transports.nccl.transport import NcclTransport
from dovetail_transports.shared_memory.transport import SharedMemoryTransport


class TestTwoBuckets(WeightTransportConformance):
    """Tests shared memory with the smallest ring."""

    plugin = SharedMemoryTransport


class TestManyBuckets(WeightTransportConformance):
    """Tests shared memory with a ring that holds every bucket."""

    plugin = SharedMemoryTransport
    config = SharedMemoryConfig(name="shared_memory", buckets=32)

    def needs_processes(self) -> None:
        """Skip the test between processes, which `TestTwoBuckets` runs."""
        pytest.skip("tried with two buckets")


class TestOverGloo(WeightTransportConformance):
    """Tests the transport `nccl` with gloo between CPUs, since NCCL itself needs a GPU for every process."""

    plugin = NcclTransport


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA GPU")
class TestOnOneGpu(WeightTransportConformance):
    """Tests CUDA IPC with sender and receiver on one GPU."""

    plugin = CudaIpcTransport
    device = "cuda:0"
