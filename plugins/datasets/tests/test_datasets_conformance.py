"""The conformance suites on the dataset source, the samplers and the source `examples`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.interfaces import Examples, Trainer
from dovetail.sections import TrainerSection
from dovetail_datasets.examples_source import ExamplesSource
from dovetail_datasets.files import FilesSource
from dovetail_datasets.samplers import SequentialSampler, ShuffledSampler
from dovetail_sdk.testing.conformance import (
    DatasetConformance,
    SamplerConformance,
    SourceConformance,
)
from dovetail_sdk.testing.pair_objective import PairMargin

TestShuffled = SamplerConformance.of(ShuffledSampler)
TestSequential = SamplerConformance.of(SequentialSampler)


class TestFiles(DatasetConformance):
    plugin = FilesSource

    def write(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Reading(Trainer):
    """A trainer that takes preference pairs of a dataset."""

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
