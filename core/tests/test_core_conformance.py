"""The plugins that core ships pass the suites of their kinds.

Legend: N samples, T response tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.data.files import FilesSource
from dovetail.data.samplers import SequentialSampler, ShuffledSampler
from dovetail.dispatch import Mesh
from dovetail.examples.source import ExamplesSource
from dovetail.interfaces import Examples, Trainer
from dovetail.plugins.index import default_index
from dovetail.sections import TrainerSection
from dovetail.telemetry.jsonl import JsonlTracker
from dovetail.workers.inline import InlineRuntime
from dovetail.workers.modes import AllToAll, Nd, OneToAll, RankZero
from dovetail_sdk.testing.conformance import (
    DatasetConformance,
    DispatchModeConformance,
    RuntimeConformance,
    SamplerConformance,
    SourceConformance,
    TrackerConformance,
)
from dovetail_sdk.testing.pair_objective import PairMargin


def test_every_plugin_of_core_has_a_suite() -> None:
    entries = [e for e in default_index().entries() if e.distribution == "dovetail-core"]
    tried = {suite.plugin.name for name, suite in globals().items() if name.startswith("Test")}
    assert {entry.name for entry in entries} <= tried


TestShuffled = SamplerConformance.of(ShuffledSampler)
TestSequential = SamplerConformance.of(SequentialSampler)


class TestFiles(DatasetConformance):
    plugin = FilesSource

    def write(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


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


class Reading(Trainer):
    """Takes pairs of the dataset."""

    name, api, Config = "reading", ">=2.0,<3", TrainerSection

    @classmethod
    def examples(cls, config: Any) -> Examples:
        return "preferences"

    def run(self, run: Any) -> None: ...


class TestExamples(SourceConformance):
    plugin = ExamplesSource
    overrides = ("trainer={name: reading, total_steps: 3}", "actor.objective=margin")
    plugins = (Reading, type("Margin", (PairMargin,), {"name": "margin", "api": ">=1.0,<2"}))
    rows = tuple({"prompt": f"{n} + 1 =", "chosen": str(n + 1), "rejected": "-"} for n in range(8))
