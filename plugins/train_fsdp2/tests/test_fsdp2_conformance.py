"""The conformance suite on the engine."""

from __future__ import annotations

from dovetail_sdk.testing.conformance import EngineConformance
from dovetail_train_fsdp2.engine import Fsdp2Engine


class TestFsdp2(EngineConformance):
    plugin = Fsdp2Engine
