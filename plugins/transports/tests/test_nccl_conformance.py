"""The conformance suite on the transport `nccl`, as `dovetail plugins check` runs it."""

from __future__ import annotations

from dovetail_transports.conformance import TestOverGloo

__all__ = ["TestOverGloo"]
