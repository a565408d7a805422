"""The plugins that core ships pass the suites of their kinds, as everybody's do."""

from __future__ import annotations

import json

import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.data.files import FilesSource
from dovetail.data.samplers import SequentialSampler, ShuffledSampler
from dovetail.dispatch.inline import InlineRuntime
from dovetail.dispatch.modes import AllToAll, Nd, OneToAll, RankZero
from dovetail.flow.on_policy import OnPolicyTrainer
from dovetail.numerics import loss_aggregation as aggregations
from dovetail.numerics.kl_controller import AdaptiveKl, FixedKl
from dovetail.telemetry.console import ConsoleTracker
from dovetail.telemetry.jsonl import JsonlTracker
from dovetail_sdk.testing.conformance import (
    DatasetConformance,
    DispatchModeConformance,
    KlControllerConformance,
    LossAggregationConformance,
    RuntimeConformance,
    SamplerConformance,
    TrackerConformance,
    TrainerConformance,
)


class TestTokenMean(LossAggregationConformance):
    plugin = aggregations.TokenMean


class TestTokenSum(LossAggregationConformance):
    plugin = aggregations.TokenSum


class TestSeqMeanTokenSum(LossAggregationConformance):
    plugin = aggregations.SeqMeanTokenSum


class TestSeqMeanTokenMean(LossAggregationConformance):
    plugin = aggregations.SeqMeanTokenMean


class TestSeqMeanTokenSumNorm(LossAggregationConformance):
    plugin = aggregations.SeqMeanTokenSumNorm


class TestFixedKl(KlControllerConformance):
    plugin = FixedKl


class TestAdaptiveKl(KlControllerConformance):
    plugin = AdaptiveKl


class TestShuffled(SamplerConformance):
    plugin = ShuffledSampler


class TestSequential(SamplerConformance):
    plugin = SequentialSampler


class TestFiles(DatasetConformance):
    plugin = FilesSource

    def write(self, path, rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class TestConsole(TrackerConformance):
    plugin = ConsoleTracker


class TestJsonl(TrackerConformance):
    plugin = JsonlTracker


class TestOnPolicy(TrainerConformance):
    plugin = OnPolicyTrainer


class TestInline(RuntimeConformance):
    plugin = InlineRuntime


class TestOneToAll(DispatchModeConformance):
    plugin = OneToAll


class TestRankZero(DispatchModeConformance):
    plugin = RankZero

    def expected(self, mesh, results):
        return results[0]


class TestAllToAll(DispatchModeConformance):
    plugin = AllToAll

    def arguments(self, mesh):
        return ([f"for rank {rank}" for rank in range(mesh.size)],), {}


class TestNd(DispatchModeConformance):
    plugin = Nd

    def arguments(self, mesh):
        responses = Ragged.from_list([np.arange(k + 1) for k in range(6)], dtype=np.int64)
        return (Batch({"response_ids": responses}),), {"outputs": frozenset({"log_probs"})}
