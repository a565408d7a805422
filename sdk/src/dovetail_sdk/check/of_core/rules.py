"""The suites of core's own preflight rules: for each, configs that it has nothing against, and such that it finds wrong."""

from __future__ import annotations

from dovetail.interfaces import PreflightRule
from dovetail.preflight import (
    adapters,
    environments,
    groups,
    inputs,
    kl,
    log_probs,
    losses,
    profiling,
    rollouts,
    sizes,
    stages,
    unused,
    vocabularies,
)
from dovetail_sdk.testing import scripted_rollout
from dovetail_sdk.testing.conformance import PreflightConformance

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
    # What these five find depends on the model, or on stages of other packages.
    stages.RewriteUnread: (("algorithm.overlong_penalty.buffer=16",), ()),
    stages.StageOrderUnknown: (("algorithm.overlong_penalty.buffer=16",), ()),
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


def _suite(rule: type[PreflightRule], sound: _Overrides, wrong: _Overrides) -> type:
    members = {
        "plugin": rule,
        "sound": ((), sound),
        "wrong": (wrong,) if wrong else (),
        "__module__": __name__,
    }
    return type(f"Test{rule.__name__}", (PreflightConformance,), members)


globals().update({f"Test{rule.__name__}": _suite(rule, *two) for rule, two in EXAMPLES.items()})
