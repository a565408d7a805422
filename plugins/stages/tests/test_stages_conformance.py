"""The plugins of this package pass the suites of their kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dovetail.batch import Batch
from dovetail.plugins.index import default_index
from dovetail_sdk.testing.conformance import (
    KlControllerConformance,
    LossAggregationConformance,
    StageConformance,
    StageSetConformance,
)
from dovetail_stages.advantage import EstimateAdvantages
from dovetail_stages.follow_actor import FollowActor
from dovetail_stages.kl_penalty import KlPenalty
from dovetail_stages.logprob_check import LogProbCheck
from dovetail_stages.numerics import loss_aggregation as aggregations
from dovetail_stages.numerics.kl_controller import AdaptiveKl, FixedKl
from dovetail_stages.old_log_probs_from_rollout import OldLogProbsFromRollout
from dovetail_stages.overlong_penalty import OverlongPenalty
from dovetail_stages.rollout_correction import CorrectRollout
from dovetail_stages.score_actor import ScoreActor
from dovetail_stages.score_critic import ScoreCritic
from dovetail_stages.score_ref import ScoreRef
from dovetail_stages.standard import Standard
from dovetail_stages.update_actor import UpdateActor
from dovetail_stages.update_critic import UpdateCritic
from dovetail_stages.update_roles import UpdateRoles


def test_every_plugin_has_a_suite() -> None:
    entries = [e for e in default_index().entries() if e.distribution == "dovetail-stages"]
    tried = {suite.plugin.name for name, suite in globals().items() if name.startswith("Test")}
    assert {entry.name for entry in entries} <= tried


TestTokenMean = LossAggregationConformance.of(aggregations.TokenMean)
TestTokenSum = LossAggregationConformance.of(aggregations.TokenSum)
TestSeqMeanTokenSum = LossAggregationConformance.of(aggregations.SeqMeanTokenSum)
TestSeqMeanTokenMean = LossAggregationConformance.of(aggregations.SeqMeanTokenMean)
TestSeqMeanTokenSumNorm = LossAggregationConformance.of(aggregations.SeqMeanTokenSumNorm)
TestFixedKl = KlControllerConformance.of(FixedKl)
TestAdaptiveKl = KlControllerConformance.of(AdaptiveKl)
TestStandard = StageSetConformance.of(Standard)


# Stages, each in a config in which the planner activates it

_OLD = {"old_log_probs": "the policy loss"}
_REF = {"ref_log_probs": "the KL penalty"}
_VALUES = {"values": "the estimator", "returns": "the critic"}
_CORRECTED = "algorithm.rollout_correction=decoupled_k3_rs_token_tis"
_KL_IN_LOSS = "algorithm.kl.in_loss.coef=0.01"


class ActiveStageConformance(StageConformance):
    """The suite of a stage that the planner leaves out if `because` is None."""

    def test_the_planner_activates_it_in_this_config(self) -> None:
        assert self.asked("because")


class TestOldLogProbsFromRollout(ActiveStageConformance):
    """The rollout policy is the old policy."""

    plugin = OldLogProbsFromRollout
    overrides = ("algorithm.rollout_correction=bypass_ppo_clip",)
    required = _OLD


class TestScoreActor(ActiveStageConformance):
    """Every output of the actor's pass but the reference policy's."""

    plugin = ScoreActor
    required = _OLD | {"sum_pi_squared": "an estimator", "entropies": "an estimator"}


class TestScoreActorUnderAdapters(ActiveStageConformance):
    """With its adapters off, the actor is the reference policy."""

    plugin = ScoreActor
    overrides = ("actor.engine={name: fsdp2, lora: {rank: 4}}",)
    required = _REF


class TestScoreRef(ActiveStageConformance):
    """A frozen reference policy."""

    plugin = ScoreRef
    required = _REF


class TestScoreCritic(ActiveStageConformance):
    """A critic for GAE."""

    plugin = ScoreCritic
    overrides = ("algorithm.advantage=gae",)
    required = _VALUES


class TestLogProbCheck(ActiveStageConformance):
    """The actor scores some samples for the check alone; the rollout agrees with it."""

    plugin = LogProbCheck

    def columns(self, seed: int, groups: int = 5, n: int = 4) -> Batch:
        batch = super().columns(seed, groups, n)
        log_probs = self.outputs("actor", batch, frozenset({"log_probs"}))["log_probs"]
        agreed = {"rollout_log_probs", "raw_rollout_log_probs", "old_log_probs"}
        return batch.with_columns(dict.fromkeys(agreed & set(batch.names), log_probs))


class TestLogProbCheckOfEveryStep(TestLogProbCheck):
    """Every step has the actor's log-probabilities anyway."""

    required = _OLD


class TestCorrectRollout(ActiveStageConformance):
    """Weights and rejection."""

    plugin = CorrectRollout
    overrides = (_CORRECTED, "actor.epochs=2")
    required = _OLD


class TestCorrectRolloutBehindAFilter(ActiveStageConformance):
    """A sample filter has made a `loss_mask`, which rejection narrows."""

    plugin = CorrectRollout
    overrides = (_CORRECTED, "actor.epochs=2", "algorithm.sample_filters=[{name: overlong}]")
    required = _OLD | {"loss_mask": "algorithm.sample_filters"}


class TestOverlongPenalty(ActiveStageConformance):
    """Some responses are within the buffer."""

    plugin = OverlongPenalty
    overrides = ("algorithm.overlong_penalty.buffer=8", "data.max_response_length=12")


class TestKlPenalty(ActiveStageConformance):
    """KL penalty, whose weight a controller moves."""

    plugin = KlPenalty
    overrides = ("algorithm.kl.in_reward={coef: 0.01, controller: adaptive}",)
    required = _OLD | _REF


class TestEstimateAdvantages(ActiveStageConformance):
    """One advantage a sample, [N]."""

    plugin = EstimateAdvantages
    required = {"advantages": "the policy loss"}  # noqa: RUF012


class TestEstimateAdvantagesAndReturns(ActiveStageConformance):
    """One advantage and one return a token, [T]."""

    plugin = EstimateAdvantages
    overrides = ("algorithm.advantage=gae",)
    required = _VALUES


class TestUpdateCritic(ActiveStageConformance):
    """The critic's optimizer steps."""

    plugin = UpdateCritic
    overrides = ("algorithm.advantage=gae",)
    required = _VALUES


class TestUpdateRoles(ActiveStageConformance):
    """A further model with an objective."""

    plugin = UpdateRoles
    overrides = ("roles={second: {head: value, objective: value}}",)
    required = _VALUES


class TestUpdateActor(ActiveStageConformance):
    """One update a rollout, with a KL term."""

    plugin = UpdateActor
    overrides = (_KL_IN_LOSS,)
    required = _REF


class TestUpdateActorOffPolicy(ActiveStageConformance):
    """Several updates a rollout, with weights of a rollout correction and the mask that it narrowed."""

    plugin = UpdateActor
    overrides = (_CORRECTED, "actor.epochs=2", "actor.shuffle=true")
    required = _OLD


class TestFollowActor(ActiveStageConformance):
    """The reference averages the actor in every step, a further model is copied in every second one."""

    plugin = FollowActor
    overrides = ("ref.update.decay=0.9", "roles.slow.update.every=2")
    required = _REF

    def make(self, **context: Any) -> FollowActor:
        return super().make(**context, run_directory=Path("runs"))
