"""The conformance suite on shared memory, as `dovetail plugins check` runs it."""

from __future__ import annotations

from dovetail_transports.conformance import TestManyBuckets, TestTwoBuckets

__all__ = ["TestManyBuckets", "TestTwoBuckets"]
