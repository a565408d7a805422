"""The conformance suite on core's own transports."""

from __future__ import annotations

from dovetail.config.builtin import DiskTransportConfig, InProcessTransportConfig
from dovetail.transports.disk import DiskTransport
from dovetail.transports.in_process import InProcessTransport
from dovetail_sdk.testing.conformance import WeightTransportConformance


class TestInProcess(WeightTransportConformance):
    plugin = InProcessTransport
    config = InProcessTransportConfig(name="in_process", timeout=1.0)


class TestDisk(WeightTransportConformance):
    plugin = DiskTransport
    config = DiskTransportConfig(name="disk", timeout=3.0)
