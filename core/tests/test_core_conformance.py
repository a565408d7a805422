"""The plugins that core ships pass the suites of their kinds.

Legend: N samples, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.dispatch import Mesh
from dovetail.plugins.index import default_index
from dovetail.telemetry.jsonl import JsonlTracker
from dovetail.workers.inline import InlineRuntime
from dovetail.workers.modes import AllToAll, Nd, OneToAll, RankZero
from dovetail_sdk.testing.conformance import (
    DispatchModeConformance,
    RuntimeConformance,
    TrackerConformance,
)


def test_every_plugin_of_core_has_a_suite() -> None:
    entries = [e for e in default_index().entries() if e.distribution == "dovetail-core"]
    tried = {suite.plugin.name for name, suite in globals().items() if name.startswith("Test")}
    assert {entry.name for entry in entries} <= tried


TestJsonl = TrackerConformance.of(JsonlTracker)
TestInline = RuntimeConformance.of(InlineRuntime)
TestOneToAll = DispatchModeConformance.of(OneToAll)


class TestRankZero(DispatchModeConformance):
    plugin = RankZero

    def expected(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        return results[0]


class TestAllToAll(DispatchModeConformance):
    plugin = AllToAll

    def arguments(self, mesh: Mesh) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ([f"for rank {rank}" for rank in range(mesh.size)],), {}


class TestNd(DispatchModeConformance):
    plugin = Nd

    def arguments(self, mesh: Mesh) -> tuple[tuple[Any, ...], dict[str, Any]]:
        responses = Ragged.from_list([np.arange(k + 1) for k in range(6)], dtype=np.int64)
        return (Batch({"response_ids": responses}),), {"outputs": frozenset({"log_probs"})}
