"""The conformance suite on shared memory: the smallest ring, and one that holds every bucket."""

from __future__ import annotations

from dovetail_sdk.testing.conformance import WeightTransportConformance
from dovetail_transports.config import SharedMemoryConfig
from dovetail_transports.shared_memory.transport import SharedMemoryTransport


class TestTwoBuckets(WeightTransportConformance):
    plugin = SharedMemoryTransport
    config = SharedMemoryConfig(name="shared_memory", timeout=3.0)


class TestManyBuckets(WeightTransportConformance):
    plugin = SharedMemoryTransport
    config = SharedMemoryConfig(name="shared_memory", timeout=3.0, buckets=32)

    def needs_processes(self) -> None:
        """Processes are tried with the smallest ring."""
        import pytest

        pytest.skip("tried with two buckets")
