"""The conformance suite on the transport `nccl`, whose buckets gloo carries between CPUs."""

from __future__ import annotations

from dovetail_sdk.testing.conformance import WeightTransportConformance
from dovetail_transports.config import NcclConfig
from dovetail_transports.nccl.transport import NcclTransport


class TestOverGloo(WeightTransportConformance):
    plugin = NcclTransport
    config = NcclConfig(name="nccl", timeout=3.0)
