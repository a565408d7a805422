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
from dovetail.interfaces import Examples, PreflightRule, Trainer
from dovetail.numerics import loss_aggregation as aggregations
from dovetail.numerics.kl_controller import AdaptiveKl, FixedKl
from dovetail.plugins.index import default_index
from dovetail.preflight import (
    adapters,
    environments,
    groups,
    history_changes,
    inputs,
    kl,
    log_probs,
    losses,
    profiling,
    rollouts,
    sizes,
    stages,
    turn_ends,
    unused,
    vocabularies,
)
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
from dovetail_sdk.testing import scripted_rollout
from dovetail_sdk.testing.conformance import (
    AgentLoopConformance,
    DatasetConformance,
    DispatchModeConformance,
    KlControllerConformance,
    LossAggregationConformance,
    PreflightConformance,
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


# Preflight rules

_Overrides = tuple[str, ...]
_SILENT = f"rollout={{path: {scripted_rollout.__file__}, attribute: ScriptedRollout}}"
"""A rollout that gives no log-probabilities."""
_CORRECTED = "algorithm.rollout_correction=decoupled_token_is"
_LENGTHS = ("data.max_response_length=2048", "data.max_prompt_length=128")

EXAMPLES: dict[type[PreflightRule], tuple[_Overrides, _Overrides]] = {
    losses.OffPolicyUnclipped: (
        ("actor.epochs=4",),
        ("algorithm.policy_loss=reinforce", "actor.epochs=4"),
    ),
    losses.MaxKlNeverFires: (("actor.max_kl=0.1", "actor.epochs=2"), ("actor.max_kl=0.1",)),
    losses.LossAggregationOverridden: (
        ("algorithm.policy_loss=gspo", "algorithm.loss_aggregation=seq_mean_token_mean"),
        ("algorithm.policy_loss=gspo",),
    ),
    losses.ClipRangeOfAnotherLoss: (
        ("algorithm.policy_loss={name: gspo, clip_low: 0.001, clip_high: 0.05}",),
        ("algorithm.policy_loss={name: gspo, clip_high: 0.2}",),
    ),
    losses.NormLength: (
        ("algorithm.loss_aggregation=seq_mean_token_sum_norm",),
        ("algorithm.loss_aggregation=seq_mean_token_sum_norm", *_LENGTHS),
    ),
    log_probs.TruncatedLogProbs: (("rollout.top_p=0.9",), ("rollout.top_p=0.9", _CORRECTED)),
    log_probs.CorrectionWithoutLogProbs: ((_CORRECTED,), (_SILENT, _CORRECTED)),
    log_probs.WeightsIgnored: (
        (_CORRECTED,),
        (_CORRECTED, "algorithm.policy_loss=dppo"),
    ),
    log_probs.LogProbCheckNeverFires: (
        ("algorithm.logprob_check.every=0",),
        ("algorithm.logprob_check.every=11",),
    ),
    kl.KlTwice: (
        ("algorithm.kl.in_loss={coef: 0}", "algorithm.kl.in_reward={}"),
        ("algorithm.kl.in_loss={coef: 0.1}", "algorithm.kl.in_reward={coef: 0.2}"),
    ),
    kl.K1InLoss: (
        ("algorithm.kl.in_loss={estimator: k1+}",),
        ("algorithm.kl.in_loss={estimator: k1}",),
    ),
    groups.GroupOfOne: (("rollout.n=2",), ("rollout.n=1",)),
    groups.FilterWithoutRefill: (
        ("algorithm.sample_filters=[equal_rewards]", "algorithm.max_generation_rounds=2"),
        ("algorithm.sample_filters=[equal_rewards]",),
    ),
    sizes.TokenBudget: (
        ("critic.max_tokens_per_micro_batch=10",),
        ("algorithm.advantage=gae", "critic.max_tokens_per_micro_batch=2047"),
    ),
    sizes.WarmupTooLong: (("actor.optim.warmup_steps=9",), ("actor.optim.warmup_steps=10",)),
    sizes.LongPenaltyBuffer: (
        ("algorithm.overlong_penalty={buffer: 1023}",),
        ("algorithm.overlong_penalty={buffer: 1024}",),
    ),
    unused.CriticUnused: (
        ("critic.value_clip=0.2", "algorithm.advantage=gae"),
        ("critic.value_clip=0.2",),
    ),
    unused.AlgorithmUnused: (
        ("actor.objective=policy",),
        ("actor.objective=policy", "algorithm.policy_loss=gspo"),
    ),
    unused.RolloutUnused: (
        ("trainer.name=supervised", "actor.objective=nll"),
        ("trainer.name=supervised", "actor.objective=nll", "rollout.n=4"),
    ),
    unused.PartialRolloutUnused: ((), ("rollout.partial_rollout=true",)),
    unused.BestMetricUnknown: (
        ("data.val_files=v.jsonl", "trainer.best_metric=val/response_length/mean"),
        ("data.val_files=v.jsonl", "trainer.best_metric=val/gsm8k/maen@1"),
    ),
    inputs.FileTwice: (
        ("data.train_files=[a.jsonl, b.jsonl]", "data.val_files=c.jsonl"),
        ("data.train_files=[a.jsonl, b.jsonl, ./a.jsonl]",),
    ),
    inputs.TrackerTwice: (("tracking=[console, jsonl]",), ("tracking=[console, console]",)),
    inputs.ModelMissing: (
        ("algorithm.advantage=gae",),
        ("algorithm.advantage=gae", "critic.path=/no/such/model"),
    ),
    # What these seven find depends on the model, or on stages and agent loops of other packages.
    groups.SeveralSequences: (("algorithm.advantage=gae",), ()),
    stages.RewriteUnread: (("algorithm.overlong_penalty.buffer=16",), ()),
    stages.StageOrderUnknown: (("algorithm.overlong_penalty.buffer=16",), ()),
    history_changes.HistoryChanges: (("rollout.agent_loop=single_turn",), ()),
    turn_ends.TurnEndNotStopped: (("rollout.ignore_eos=true",), ()),
    # What it finds depends on the model's chat template and on the data.
    turn_ends.RowsLeftOut: ((), ()),
    vocabularies.VocabularyDiffers: (("algorithm.advantage=gae", "critic.path=/no/such/model"), ()),
    adapters.AdapterTargets: (("actor.engine={name: fsdp2, lora: {rank: 4}}",), ()),
    rollouts.RolloutLayout: (("rollout={name: vllm, tensor_parallel_size: 2}",), ()),
    rollouts.RolloutTooShort: (
        ("rollout={name: vllm, max_model_len: 2048}",),
        ("rollout={name: vllm, max_model_len: 2047}",),
    ),
    rollouts.OffloadFreesNothing: (
        ("rollout={name: vllm, offload: true}", "runtime={name: ray, gpus_per_node: 2}"),
        ("rollout={name: vllm, offload: true}", "runtime={name: inline, device: cpu}"),
    ),
    environments.EnvironmentUnfit: (
        ("runtime.name=ray",),
        ("runtime={name: ray, environments: {rollout: /no/such/environment}}",),
    ),
    # What it finds depends on which engines are installed.
    environments.EnvironmentMissing: (("runtime.name=ray",), ()),
    profiling.ProfileMissesTheRun: (
        ("profile={tool: torch, steps: [10, 10]}",),
        ("profile={tool: torch, steps: [9, 12]}",),
    ),
}
"""Rule → overrides that it has nothing against, and overrides that it finds wrong."""


for rule, (sound, wrong) in EXAMPLES.items():
    suite = PreflightConformance.of(rule, sound=((), sound), wrong=(wrong,) if wrong else ())
    globals()[suite.__name__] = suite


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
