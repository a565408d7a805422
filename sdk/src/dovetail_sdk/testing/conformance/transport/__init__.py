"""The conformance suite of weight transports."""

from __future__ import annotations

from dovetail_sdk.testing.conformance.transport.suite import WeightTransportConformance

__all__ = ["WeightTransportConformance"]
