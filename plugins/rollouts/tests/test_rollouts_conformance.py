"""The plugins of this package pass the conformance suites of their kinds."""

from __future__ import annotations

from dovetail.plugins import default_index
from dovetail_rollouts.single_turn import SingleTurn
from dovetail_rollouts.source import RolloutsSource
from dovetail_rollouts.transports.disk import DiskTransport
from dovetail_rollouts.transports.in_process import InProcessTransport
from dovetail_sdk.testing.conformance import (
    AgentLoopConformance,
    SourceConformance,
    WeightTransportConformance,
)


def test_every_plugin_of_the_library_has_a_suite() -> None:
    entries = [e for e in default_index().entries() if e.distribution == "dovetail-rollouts"]
    tried = {suite.plugin.name for name, suite in globals().items() if name.startswith("Test")}
    assert {entry.name for entry in entries} == tried


TestRollouts = SourceConformance.of(RolloutsSource)
TestSingleTurn = AgentLoopConformance.of(SingleTurn)
TestInProcess = WeightTransportConformance.of(InProcessTransport)
TestDisk = WeightTransportConformance.of(DiskTransport)
