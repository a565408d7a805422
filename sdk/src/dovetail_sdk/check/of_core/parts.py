"""The suites of core's plugins other than preflight rules."""

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
from dovetail.numerics import loss_aggregation as aggregations
from dovetail.numerics.kl_controller import AdaptiveKl, FixedKl
from dovetail.telemetry.console import ConsoleTracker
from dovetail.telemetry.jsonl import JsonlTracker
from dovetail.transports.disk import DiskTransport
from dovetail.transports.in_process import InProcessTransport
from dovetail.workers.inline import InlineRuntime
from dovetail.workers.modes import AllToAll, Nd, OneToAll, RankZero
from dovetail_sdk.testing.conformance import (
    DatasetConformance,
    DispatchModeConformance,
    KlControllerConformance,
    LossAggregationConformance,
    RuntimeConformance,
    SamplerConformance,
    TrackerConformance,
    WeightTransportConformance,
)


class TestTokenMean(LossAggregationConformance):
    """Token mean."""

    plugin = aggregations.TokenMean


class TestTokenSum(LossAggregationConformance):
    """Token sum."""

    plugin = aggregations.TokenSum


class TestSeqMeanTokenSum(LossAggregationConformance):
    """Seq mean token sum."""

    plugin = aggregations.SeqMeanTokenSum


class TestSeqMeanTokenMean(LossAggregationConformance):
    """Seq mean token mean."""

    plugin = aggregations.SeqMeanTokenMean


class TestSeqMeanTokenSumNorm(LossAggregationConformance):
    """Seq mean token sum norm."""

    plugin = aggregations.SeqMeanTokenSumNorm


class TestFixedKl(KlControllerConformance):
    """Fixed kl."""

    plugin = FixedKl


class TestAdaptiveKl(KlControllerConformance):
    """Adaptive kl."""

    plugin = AdaptiveKl


class TestShuffled(SamplerConformance):
    """Shuffled."""

    plugin = ShuffledSampler


class TestSequential(SamplerConformance):
    """Sequential."""

    plugin = SequentialSampler


class TestFiles(DatasetConformance):
    """Files."""

    plugin = FilesSource

    def write(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class TestConsole(TrackerConformance):
    """Console."""

    plugin = ConsoleTracker


class TestJsonl(TrackerConformance):
    """Jsonl."""

    plugin = JsonlTracker


class TestInline(RuntimeConformance):
    """Inline."""

    plugin = InlineRuntime


class TestOneToAll(DispatchModeConformance):
    """One to all."""

    plugin = OneToAll


class TestRankZero(DispatchModeConformance):
    """Rank zero."""

    plugin = RankZero

    def expected(self, mesh: Mesh, results: Sequence[Any]) -> Any:
        return results[0]


class TestAllToAll(DispatchModeConformance):
    """All to all."""

    plugin = AllToAll

    def arguments(self, mesh: Mesh) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ([f"for rank {rank}" for rank in range(mesh.size)],), {}


class TestNd(DispatchModeConformance):
    """Nd."""

    plugin = Nd

    def arguments(self, mesh: Mesh) -> tuple[tuple[Any, ...], dict[str, Any]]:
        responses = Ragged.from_list([np.arange(k + 1) for k in range(6)], dtype=np.int64)
        return (Batch({"response_ids": responses}),), {"outputs": frozenset({"log_probs"})}


class TestInProcess(WeightTransportConformance):
    """In process."""

    plugin = InProcessTransport


class TestDisk(WeightTransportConformance):
    """Disk."""

    plugin = DiskTransport
