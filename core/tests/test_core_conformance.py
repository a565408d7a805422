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
from dovetail.numerics import loss_aggregation as aggregations
from dovetail.numerics.kl_controller import AdaptiveKl, FixedKl
from dovetail.plugins.index import default_index
from dovetail.rollouts.single_turn import SingleTurn
from dovetail.rollouts.source import RolloutsSource
from dovetail.sections import TrainerSection
from dovetail.stages.advantage import EstimateAdvantages
from dovetail.stages.follow_actor import FollowActor
from dovetail.stages.kl_penalty import KlPenalty
from dovetail.stages.logprob_check import LogProbCheck
from dovetail.stages.old_log_probs_from_rollout import OldLogProbsFromRollout
from dovetail.stages.overlong_penalty import OverlongPenalty
from dovetail.stages.rollout_correction import CorrectRollout
from dovetail.stages.score_actor import ScoreActor
from dovetail.stages.score_critic import ScoreCritic
from dovetail.stages.score_ref import ScoreRef
from dovetail.stages.standard import Standard
from dovetail.stages.update_actor import UpdateActor
from dovetail.stages.update_critic import UpdateCritic
from dovetail.stages.update_roles import UpdateRoles
from dovetail.telemetry.console import ConsoleTracker
from dovetail.telemetry.jsonl import JsonlTracker
from dovetail.transports.disk import DiskTransport
from dovetail.transports.in_process import InProcessTransport
from dovetail.workers.inline import InlineRuntime
from dovetail.workers.modes import AllToAll, Nd, OneToAll, RankZero
from dovetail_sdk.testing.conformance import (
    AgentLoopConformance,
    DatasetConformance,
    DispatchModeConformance,
    KlControllerConformance,
    LossAggregationConformance,
    RuntimeConformance,
    SamplerConformance,
    SourceConformance,
    StageConformance,
    StageSetConformance,
    TrackerConformance,
    WeightTransportConformance,
)
from dovetail_sdk.testing.pair_objective import PairMargin


def test_every_plugin_of_core_has_a_suite() -> None:
    entries = [e for e in default_index().entries() if e.distribution == "dovetail-core"]
    tried = {suite.plugin.name for name, suite in globals().items() if name.startswith("Test")}
    assert {entry.name for entry in entries} <= tried


TestTokenMean = LossAggregationConformance.of(aggregations.TokenMean)
TestTokenSum = LossAggregationConformance.of(aggregations.TokenSum)
TestSeqMeanTokenSum = LossAggregationConformance.of(aggregations.SeqMeanTokenSum)
TestSeqMeanTokenMean = LossAggregationConformance.of(aggregations.SeqMeanTokenMean)
TestSeqMeanTokenSumNorm = LossAggregationConformance.of(aggregations.SeqMeanTokenSumNorm)
TestFixedKl = KlControllerConformance.of(FixedKl)
TestAdaptiveKl = KlControllerConformance.of(AdaptiveKl)
TestShuffled = SamplerConformance.of(ShuffledSampler)
TestSequential = SamplerConformance.of(SequentialSampler)
TestSingleTurn = AgentLoopConformance.of(SingleTurn)


class TestFiles(DatasetConformance):
    plugin = FilesSource

    def write(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


TestConsole = TrackerConformance.of(ConsoleTracker)
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


TestRollouts = SourceConformance.of(RolloutsSource)
TestStandard = StageSetConformance.of(Standard)


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


TestInProcess = WeightTransportConformance.of(InProcessTransport)
TestDisk = WeightTransportConformance.of(DiskTransport)


# Stages, each in a config in which the planner activates it

_OLD = {"old_log_probs": "the policy loss"}
_REF = {"ref_log_probs": "the KL penalty"}
_VALUES = {"values": "the estimator", "returns": "the critic"}
_CORRECTED = "algorithm.rollout_correction=decoupled_k3_rs_token_tis"
_KL_IN_LOSS = "algorithm.kl.in_loss.coef=0.01"


class CoreStageConformance(StageConformance):
    """A stage of core, which the planner leaves out where `because` is None."""

    def test_the_planner_activates_it_in_this_config(self) -> None:
        assert self.asked("because")


class TestOldLogProbsFromRollout(CoreStageConformance):
    """The rollout policy is the old one."""

    plugin = OldLogProbsFromRollout
    overrides = ("algorithm.rollout_correction=bypass_ppo_clip",)
    required = _OLD


class TestScoreActor(CoreStageConformance):
    """Every output of the actor's pass but the reference policy's."""

    plugin = ScoreActor
    required = _OLD | {"sum_pi_squared": "an estimator", "entropies": "an estimator"}


class TestScoreActorUnderAdapters(CoreStageConformance):
    """With its adapters off, the actor is the reference policy."""

    plugin = ScoreActor
    overrides = ("actor.engine={name: fsdp2, lora: {rank: 4}}",)
    required = _REF


class TestScoreRef(CoreStageConformance):
    """A frozen reference policy."""

    plugin = ScoreRef
    required = _REF


class TestScoreCritic(CoreStageConformance):
    """A critic for GAE."""

    plugin = ScoreCritic
    overrides = ("algorithm.advantage=gae",)
    required = _VALUES


class TestLogProbCheck(CoreStageConformance):
    """The actor scores some samples for the check alone; the rollout agrees with it."""

    plugin = LogProbCheck

    def columns(self, seed: int, groups: int = 5, n: int = 4) -> Batch:
        batch = super().columns(seed, groups, n)
        log_probs = self.outputs("actor", batch, frozenset({"log_probs"}))["log_probs"]
        agreed = {"rollout_log_probs", "raw_rollout_log_probs", "old_log_probs"}
        return batch.with_columns(dict.fromkeys(agreed & set(batch.names), log_probs))


class TestLogProbCheckOfEveryStep(TestLogProbCheck):
    """The actor's log-probabilities are there anyway."""

    required = _OLD


class TestCorrectRollout(CoreStageConformance):
    """Weights and rejection."""

    plugin = CorrectRollout
    overrides = (_CORRECTED, "actor.epochs=2")
    required = _OLD


class TestCorrectRolloutBehindAFilter(CoreStageConformance):
    """A sample filter has made a `loss_mask`, which rejection narrows."""

    plugin = CorrectRollout
    overrides = (_CORRECTED, "actor.epochs=2", "algorithm.sample_filters=[{name: overlong}]")
    required = _OLD | {"loss_mask": "algorithm.sample_filters"}


class TestOverlongPenalty(CoreStageConformance):
    """Some responses are within the buffer."""

    plugin = OverlongPenalty
    overrides = ("algorithm.overlong_penalty.buffer=8", "data.max_response_length=12")


class TestKlPenalty(CoreStageConformance):
    """KL penalty, whose weight a controller moves."""

    plugin = KlPenalty
    overrides = ("algorithm.kl.in_reward={coef: 0.01, controller: adaptive}",)
    required = _OLD | _REF


class TestEstimateAdvantages(CoreStageConformance):
    """One advantage a sample, [N]."""

    plugin = EstimateAdvantages
    required = {"advantages": "the policy loss"}  # noqa: RUF012


class TestEstimateAdvantagesAndReturns(CoreStageConformance):
    """One advantage and one return a token, [T]."""

    plugin = EstimateAdvantages
    overrides = ("algorithm.advantage=gae",)
    required = _VALUES


class TestUpdateCritic(CoreStageConformance):
    """The critic's optimizer steps."""

    plugin = UpdateCritic
    overrides = ("algorithm.advantage=gae",)
    required = _VALUES


class TestUpdateRoles(CoreStageConformance):
    """A further model with an objective."""

    plugin = UpdateRoles
    overrides = ("roles={second: {head: value, objective: value}}",)
    required = _VALUES


class TestUpdateActor(CoreStageConformance):
    """One update a rollout, with a KL term."""

    plugin = UpdateActor
    overrides = (_KL_IN_LOSS,)
    required = _REF


class TestUpdateActorOffPolicy(CoreStageConformance):
    """Several updates a rollout, with weights of a rollout correction and the mask that it narrowed."""

    plugin = UpdateActor
    overrides = (_CORRECTED, "actor.epochs=2", "actor.shuffle=true")
    required = _OLD


class TestFollowActor(CoreStageConformance):
    """The reference averages the actor in every step, a further model is copied in every second one."""

    plugin = FollowActor
    overrides = ("ref.update.decay=0.9", "roles.slow.update.every=2")
    required = _REF

    def make(self, **context: Any) -> FollowActor:
        return super().make(**context, run_directory=Path("runs"))
