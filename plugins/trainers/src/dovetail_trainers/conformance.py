"""The conformance suites of this package's plugins, which `dovetail plugins check` runs."""

from __future__ import annotations

from dovetail_sdk.testing.conformance import PreflightConformance, TrainerConformance
from dovetail_trainers.on_policy import OnPolicyTrainer
from dovetail_trainers.streaming import StreamingTrainer
from dovetail_trainers.streaming_unsound import StreamingUnsound
from dovetail_trainers.supervised import SupervisedTrainer

TestOnPolicy = TrainerConformance.of(OnPolicyTrainer)
TestStreaming = TrainerConformance.of(StreamingTrainer)
TestSupervised = TrainerConformance.of(SupervisedTrainer)


class TestStreamingUnsound(PreflightConformance):
    """Without a correction, a clip or a bound of the weights."""

    plugin = StreamingUnsound
    sound = (
        (),
        ("trainer=streaming",),
        ("trainer={name: streaming, max_staleness: 0}", "algorithm.policy_loss=reinforce"),
        ("trainer=streaming", "algorithm.policy_loss=reinforce"),
        ("trainer=streaming", "algorithm.rollout_correction=null"),
        ("trainer={name: streaming, on_sync: abort}",),
        ("trainer={name: streaming, on_sync: keep}",),
        ("trainer={name: streaming, on_sync: abort, over_sampling: 1.5}",),
        ("trainer=streaming", "algorithm.rollout_correction=decoupled_geo_rs"),
    )
    wrong = (
        (
            "trainer=streaming",
            "algorithm.rollout_correction=null",
            "algorithm.policy_loss=reinforce",
        ),
        ("trainer=streaming", "algorithm.rollout_correction.weight_upper=null"),
        ("trainer=streaming", "algorithm.rollout_correction.weights=null"),
        ("trainer=streaming", "actor.epochs=2", "algorithm.policy_loss.clip_high=20"),
        ("trainer={name: streaming, on_sync: abort}", "rollout.partial_rollout=false"),
        ("trainer={name: streaming, on_sync: abort}", "rollout.keep_cache=true"),
        ("trainer={name: streaming, on_sync: keep}", "rollout=sglang"),
        ("trainer={name: streaming, on_sync: drain, over_sampling: 1.5}",),
        (
            "trainer={name: streaming, max_staleness: 0, sync_every: 2}",
            "algorithm.rollout_correction=bypass_ppo_clip",
            "algorithm.policy_loss.clip_high=20",
        ),
    )
