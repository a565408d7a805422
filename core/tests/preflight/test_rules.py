"""Every rule: a config that trips it, what it then says, and a config that it leaves alone."""

from __future__ import annotations

import pytest

from dovetail.interfaces import AgentLoop
from dovetail.plugins.rules import installed_rules
from dovetail.sections import EpisodeSection
from dovetail_sdk.testing import PlannedObjective, findings_of, temporary_plugins

# A batch is 128 prompts and a run 10 steps, unless a case says otherwise.
CASES = {
    "off_policy_unclipped": [
        ("no ratio", ["algorithm.policy_loss=reinforce", "actor.epochs=4"], "warning", "4 updates a rollout (actor.epochs = 4"),
        ("no ratio, mini-batches", ["algorithm.policy_loss=reinforce", "actor.mini_batch_size=32"], "warning", "actor.mini_batch_size = 32 of data.train_batch_size = 128"),
        ("no ratio, and no KL to stop by", ["algorithm.policy_loss=reinforce", "actor.epochs=4", "actor.max_kl=0.1"], "warning", "no ratio"),
        ("no bound", ["actor.epochs=4", "algorithm.policy_loss.clip_high=1000"], "warning", "clip_high = 1000 clips nothing"),
        ("rejection alone", ["algorithm.policy_loss=reinforce", "actor.epochs=4", "algorithm.rollout_correction=bypass_pg_geo_rs"], "warning", "no ratio"),
    ],
    "max_kl_never_fires": [
        ("one update", ["actor.max_kl=0.1"], "warning", "a step has one update"),
        ("no ratio", ["actor.max_kl=0.1", "actor.epochs=2", "algorithm.policy_loss=gpg"], "error", "measures no KL"),
    ],
    "loss_aggregation_overridden": [
        ("gspo", ["algorithm.policy_loss=gspo"], "warning", "gspo prescribes seq_mean_token_mean"),
        ("sapo", ["algorithm.policy_loss=sapo"], "warning", "sapo prescribes seq_mean_token_mean"),
        ("dr_grpo", ["algorithm.advantage=dr_grpo"], "warning", "algorithm.advantage = dr_grpo prescribes seq_mean_token_sum_norm"),
    ],
    "clip_range_of_another_loss": [
        ("gspo", ["algorithm.policy_loss={name: gspo, clip_low: 0.2, clip_high: 0.28}"], "warning", "gspo with clip_low = 0.2 and clip_high = 0.28: it bounds the ratio of a whole sequence"),
        ("one of gspo's", ["algorithm.policy_loss={name: gspo, clip_high: 0.2}"], "warning", "gspo with clip_high = 0.2:"),
        ("ppo", ["algorithm.policy_loss={name: ppo_clip, clip_low: 3e-4, clip_high: 4e-4}"], "warning", "ppo_clip with clip_low = 0.0003 and clip_high = 0.0004: it bounds each token's ratio"),
        ("cispo", ["algorithm.policy_loss={name: cispo, clip_high: 4e-4}"], "warning", "cispo with clip_high = 0.0004"),
    ],
    "norm_length": [
        ("default", ["algorithm.loss_aggregation=seq_mean_token_sum_norm", "data.max_response_length=2048", "data.max_prompt_length=128"], "warning", "algorithm.loss_aggregation.length = 1024, but data.max_response_length = 2048: the loss is 2 times"),
        ("critic's", ["algorithm.advantage=gae", "critic.loss_aggregation={name: seq_mean_token_sum_norm, length: 64}"], "warning", "critic.loss_aggregation.length = 64"),
    ],
    "truncated_log_probs": [
        ("top_p", ["rollout.top_p=0.9", "algorithm.rollout_correction=decoupled_token_is"], "warning", "rollout.top_p = 0.9"),
        ("top_k", ["rollout.top_k=50", "algorithm.policy_loss=dppo"], "warning", "rollout.top_k = 50"),
    ],
    "kl_twice": [
        ("both", ["algorithm.kl.in_loss={coef: 0.1}", "algorithm.kl.in_reward={coef: 0.2}"], "warning", "algorithm.kl.in_loss.coef = 0.1 and algorithm.kl.in_reward.coef = 0.2"),
    ],
    "k1_in_loss": [
        ("k1", ["algorithm.kl.in_loss={estimator: k1}"], "warning", "algorithm.kl.in_loss.estimator = k1 with coef = 0.001"),
    ],
    "group_of_one": [
        ("grpo", ["rollout.n=1"], "error", "rollout.n = 1, but algorithm.advantage = grpo"),
        ("raw", ["rollout.n=1", "algorithm.advantage={name: grpo, singleton: raw}"], "warning", "there is none"),
    ],
    "filter_without_refill": [
        ("one round", ["algorithm.sample_filters=[overlong, equal_rewards]"], "warning", "algorithm.sample_filters[1] = equal_rewards drops groups"),
    ],
    "weights_ignored": [
        ("ppo", ["algorithm.rollout_correction=bypass_pg_is"], "warning", "bypass_pg_is weighs by sequence"),
        ("dppo", ["algorithm.rollout_correction=decoupled_token_is", "algorithm.policy_loss=dppo"], "warning", "decoupled_token_is weighs by token"),
    ],
    "token_budget": [
        ("critic", ["algorithm.advantage=gae", "critic.max_tokens_per_micro_batch=2047"], "error", "1024 + 1024 = 2048"),
    ],
    "rollout_too_short": [
        ("vllm", ["rollout={name: vllm, max_model_len: 2047}"], "error", "rollout.max_model_len = 2047 is too short for one sample"),
    ],
    "offload_frees_nothing": [
        ("here", ["rollout.offload=true", "rollout.name=vllm", "runtime={name: inline, device: cpu}"], "warning", "frees no memory"),
        ("Ray's CPUs", ["rollout.offload=true", "rollout.name=vllm", "runtime.name=ray"], "warning", "frees no memory"),
    ],
    "warmup_too_long": [
        ("actor", ["actor.optim.warmup_steps=10"], "warning", "actor.optim.warmup_steps = 10, but the run has 10 optimizer steps"),
        ("one", ["actor.optim.warmup_steps=1", "trainer.total_steps=1"], "warning", "the run has 1 optimizer step of the actor"),
        ("critic's optimizer", ["algorithm.advantage=gae", "critic.optim.warmup_steps=99"], "warning", "critic.optim.warmup_steps = 99"),
        ("critic", ["algorithm.advantage=gae", "critic.warmup_steps=10"], "error", "the policy is never trained"),
    ],
    "long_penalty_buffer": [
        ("longer", ["algorithm.overlong_penalty={buffer: 2000}"], "error", "even an empty response"),
        ("as long", ["algorithm.overlong_penalty={buffer: 1024}"], "warning", "every token of a response"),
    ],
    "rollout_unused": [
        ("a run on examples", ["trainer.name=supervised", "actor.objective=nll", "rollout.n=4", "rollout.validation.n=2", "reward.function=exact_match", "algorithm.kl.in_loss={coef: 0.1}", "algorithm.logprob_check.every=5", "data.val_batch_size=8"], "warning", "rollout.n, rollout.validation, reward.function, algorithm.kl.in_loss, algorithm.logprob_check.every, data.val_batch_size: trainer supervised trains on conversations"),
        ("another engine", ["trainer.name=supervised", "actor.objective=nll", "rollout.name=vllm"], "warning", "rollout.name: trainer supervised"),
        ("settings of plugins", ["trainer.name=supervised", "actor.objective=nll", "reward.manager.workers=2"], "warning", "reward.manager.workers: trainer supervised"),
    ],
    "critic_unused": [
        ("keys", ["critic.value_clip=0.2", "critic.optim.lr=1.0e-4", "critic.loss_aggregation=token_sum"], "warning", "critic.optim.lr, critic.value_clip, critic.loss_aggregation: there is no critic"),
    ],
    "algorithm_unused": [
        ("an objective given by name", ["actor.objective=policy", "algorithm.kl.in_loss={coef: 0.1}", "algorithm.policy_loss.clip_high=0.3"], "warning", "algorithm.policy_loss, algorithm.kl.in_loss: the actor minimises actor.objective = policy"),
        ("parts", ["actor.objective=policy", "algorithm.loss_aggregation=token_sum", "algorithm.entropy.coef=0.1"], "warning", "algorithm.loss_aggregation, algorithm.entropy.coef:"),
    ],
    "partial_rollout_unused": [
        ("on policy", ["rollout.partial_rollout=true"], "warning", "cuts nothing short: trainer on_policy waits"),
        ("cache", ["rollout.keep_cache=true"], "warning", "rollout.keep_cache=true keeps nothing"),
    ],
    "best_metric_unknown": [
        ("n", ["data.val_files=v.jsonl", "trainer.best_metric=val/mean@8"], "error", "no figure of validation at rollout.validation.n = 1"),
        ("misspelt", ["data.val_files=v.jsonl", "trainer.best_metric=val/gsm8k/maen@1"], "error", "val/gsm8k/maen@1"),
        ("of training", ["data.val_files=v.jsonl", "trainer.best_metric=reward/mean"], "error", "reward/mean"),
        ("no files", ["trainer.best_metric=val/mean@1"], "error", "data.val_files names no file"),
    ],
    "profile_misses_the_run": [
        ("steps", ["profile={tool: torch, steps: [9, 12]}"], "warning", "only steps 9 to 10 are recorded"),
        ("steps", ["profile={tool: torch, steps: [10, 12]}"], "warning", ": only step 10 is recorded"),
        ("all steps", ["profile={tool: torch, steps: [11, 12]}"], "warning", "beyond the run's 10 steps: nothing is recorded"),
        ("role", ["profile={tool: torch, roles: [critic]}"], "warning", "'critic', which this run does not have"),
        ("memory of a CPU", ["profile={tool: memory}", "runtime={name: inline, device: cpu}"], "error", "profile.tool=memory"),
        ("Nsight on Ray's CPUs", ["profile={tool: nsys}", "runtime.name=ray"], "error", "profile.tool=nsys"),
        ("ranks", ["profile={tool: torch, ranks: [0, 3]}"], "warning", "actor has 1 rank: nothing is recorded for [3]"),
    ],
    "logprob_check_never_fires": [
        ("rarely", ["algorithm.logprob_check.every=11"], "warning", "algorithm.logprob_check.every = 11 is more than the run's 10 steps"),
        ("stops first", ["algorithm.logprob_check={warn_above: 0.2, stop_above: 0.1}"], "warning", "stops before it has ever warned"),
        ("no warning", ["algorithm.logprob_check={warn_above: 1, stop_above: null}"], "warning", "warn_above = 1 is never passed"),
        ("no stop", ["algorithm.logprob_check.stop_above=2"], "warning", "stop_above = 2 is never passed"),
        ("never there", ["algorithm.logprob_check={every: 0, warn_above: 0.005}"], "warning", "its bounds are never looked at"),
    ],
}  # fmt: skip
QUIET = {
    "off_policy_unclipped": [
        ["algorithm.policy_loss=reinforce"],
        ["actor.epochs=4"],
        ["actor.epochs=4", "algorithm.policy_loss.clip_high=1000", "actor.max_kl=0.1"],
        ["actor.epochs=4", "algorithm.policy_loss=reinforce", "algorithm.rollout_correction=bypass_pg_is"],
        ["actor.epochs=4", "algorithm.policy_loss=dppo"],
    ],
    "max_kl_never_fires": [
        [],
        ["actor.max_kl=0.1", "actor.epochs=2"],
    ],
    "loss_aggregation_overridden": [
        [],
        ["algorithm.policy_loss=gspo", "algorithm.loss_aggregation=seq_mean_token_mean"],
        ["algorithm.advantage=dr_grpo", "algorithm.loss_aggregation=seq_mean_token_sum_norm"],
        ["algorithm.policy_loss=gspo", "actor.objective=policy"],
        # Both prescribe one: the loss's counts.
        ["algorithm.advantage=dr_grpo", "algorithm.policy_loss=gspo", "algorithm.loss_aggregation=seq_mean_token_mean"],
        ["algorithm.preset=dr_grpo"],
        ["algorithm.preset=sapo"],
    ],
    "clip_range_of_another_loss": [
        [],
        ["algorithm.policy_loss=gspo"],
        ["algorithm.policy_loss={name: gspo, clip_low: 0.001, clip_high: 0.05}"],
        ["algorithm.policy_loss={name: ppo_clip, clip_low: 0, clip_high: 0.01}"],
        ["algorithm.policy_loss={name: cispo, clip_low: null, clip_high: 0.28}"],
        ["algorithm.policy_loss=reinforce"],
    ],
    "norm_length": [
        [],
        ["algorithm.loss_aggregation=seq_mean_token_sum_norm"],
        ["algorithm.preset=dr_grpo", "data.max_response_length=300"],
        ["critic.loss_aggregation={name: seq_mean_token_sum_norm, length: 64}"],
    ],
    "truncated_log_probs": [
        ["rollout.top_p=0.9"],
        ["algorithm.rollout_correction=decoupled_token_is"],
    ],
    "rollout_too_short": [
        ["rollout.name=vllm"],
        ["rollout={name: vllm, max_model_len: 2048}"],
        [],
    ],
    "offload_frees_nothing": [
        ["rollout.name=vllm", "runtime={name: inline, device: cpu}"],
        ["rollout.name=vllm", "rollout.offload=true", "runtime={name: ray, gpus_per_node: 2}"],
    ],
    "kl_twice": [
        ["algorithm.kl.in_loss={}"],
        ["algorithm.kl={in_loss: {}, in_reward: {}}", "actor.objective=policy"],
        ["algorithm.kl.in_loss={coef: 0}", "algorithm.kl.in_reward={}"],
    ],
    "k1_in_loss": [
        ["algorithm.kl.in_loss={estimator: k1+}"],
        ["algorithm.kl.in_loss={estimator: k1, coef: 0}"],
        ["algorithm.kl.in_loss={estimator: k1}", "actor.objective=policy"],
        ["algorithm.kl.in_reward={estimator: k1}"],
    ],
    "group_of_one": [["rollout.n=2"], ["rollout.n=1", "algorithm.advantage=reinforce_plus_plus"],
        ["rollout.n=1", "algorithm.advantage=score"]],
    "filter_without_refill": [
        [],
        ["algorithm.sample_filters=[overlong]"],
        ["algorithm.sample_filters=[equal_rewards]", "algorithm.max_generation_rounds=2"],
    ],
    "weights_ignored": [
        ["algorithm.rollout_correction=bypass_pg_is", "algorithm.policy_loss=reinforce"],
        ["algorithm.rollout_correction=bypass_ppo_clip_geo_rs"],
        ["algorithm.rollout_correction=decoupled_token_is"],
    ],
    "token_budget": [
        ["critic.max_tokens_per_micro_batch=10"],
        ["algorithm.advantage=gae", "critic.max_tokens_per_micro_batch=2048"],
    ],
    "warmup_too_long": [
        ["actor.optim.warmup_steps=9"],
        ["actor.optim.warmup_steps=39", "actor.mini_batch_size=32"],
        ["critic.warmup_steps=99"],
        ["algorithm.advantage=gae", "critic.warmup_steps=9"],
    ],
    "long_penalty_buffer": [
        [],
        ["algorithm.overlong_penalty={buffer: 1023}"],
        ["algorithm.overlong_penalty={buffer: 2000, factor: 0}"],
    ],
    "critic_unused": [
        [],
        ["critic.value_clip=0.5", "critic.loss_aggregation=token_mean"],
        ["critic.value_clip=0.2", "algorithm.advantage=gae"],
    ],
    "algorithm_unused": [
        ["algorithm.kl.in_loss={coef: 0.1}", "algorithm.policy_loss=gspo"],
        ["actor.objective=policy"],
        ["actor.objective=policy", "algorithm.advantage=rloo", "algorithm.kl.in_reward={coef: 0.1}"],
    ],
    "rollout_unused": [
        ["actor.objective=policy", "rollout.n=4", "reward.timeout=5"],
        ["trainer.name=supervised", "actor.objective=nll"],
        ["trainer.name=supervised", "actor.objective=nll", "rollout.name=hf", "data.trained_turns=last"],
    ],
    "partial_rollout_unused": [[]],
    "best_metric_unknown": [
        [],
        ["data.val_files=v.jsonl", "trainer.best_metric=val/openai/gsm8k/pass@4", "rollout.validation.n=6"],
        ["data.val_files=v.jsonl", "trainer.best_metric=val/majority@6/low", "rollout.validation.n=6"],
        ["data.val_files=v.jsonl", "trainer.best_metric=val/response_length/mean"],
    ],
    "profile_misses_the_run": [
        [],
        ["profile.steps=[11,12]"],
        ["profile={tool: torch, steps: [10, 10]}"],
        ["profile={tool: memory}", "runtime={name: ray, gpus_per_node: 2}"],
        ["profile={tool: torch, roles: [actor, critic]}", "algorithm.advantage=gae"],
    ],
    "logprob_check_never_fires": [
        [],
        ["trainer.total_steps=3"],
        ["algorithm.logprob_check.every=0"],
        ["algorithm.logprob_check={every: 0, warn_above: 0.005}", "algorithm.rollout_correction=decoupled_token_is"],
        ["algorithm.logprob_check={warn_above: 0.1, stop_above: 0.1}"],
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "overrides", "severity", "words"),
    [
        pytest.param(rule, overrides, severity, words, id=f"{rule}: {title}")
        for rule, cases in CASES.items()
        for title, overrides, severity, words in cases
    ],
)
def test_it_is_found_named_and_can_be_mended(judge, rule, overrides, severity, words):
    (finding,) = judge(rule, {}, *overrides)
    assert finding.rule == rule
    assert finding.severity == severity
    assert words in finding.message
    assert finding.hint is not None
    assert "=" in finding.hint


@pytest.mark.parametrize(
    ("rule", "overrides"),
    [
        pytest.param(rule, overrides, id=f"{rule}: {' '.join(overrides) or 'defaults'}")
        for rule, cases in QUIET.items()
        for overrides in cases
    ],
)
def test_it_is_silent_where_all_is_well(judge, rule, overrides):
    assert judge(rule, {}, *overrides) == []


def test_a_correction_needs_an_engine_with_log_probabilities(judge, mute):
    rule = "correction_without_log_probs"
    correction = {"algorithm": {"rollout_correction": "decoupled_token_is"}}
    (finding,) = judge(rule, {"rollout": mute, **correction})
    assert finding.severity == "error"
    assert "rollout.name = Mute has none to give" in finding.message
    assert judge(rule, correction) == []
    assert judge(rule, {"rollout": mute}) == []
    assert judge(rule, {"rollout": mute, "algorithm": {"rollout_correction": "disabled"}}) == []


def test_an_engine_says_itself_what_else_truncates(judge, picky):
    reader = {"algorithm": {"rollout_correction": "decoupled_token_is"}}
    (finding,) = judge("truncated_log_probs", {"rollout": {**picky, "top_k": 9}, **reader})
    assert finding.message.startswith("rollout.top_k = 9 and rollout.min_p = 0.05: ")
    assert finding.hint == "set rollout.top_k=-1 rollout.min_p=0.0"
    assert not judge("truncated_log_probs", {"rollout": {**picky, "min_p": 0.0}, **reader})


class Forking(AgentLoop):
    """Forks its sessions."""

    name = "forking"
    api = ">=1.0,<2"
    capabilities = frozenset({"forks"})
    Config = EpisodeSection

    async def run(self, session):
        await session.fork().generate()


def test_what_takes_every_sequence_for_a_sample_is_refused_where_a_loop_forks(judge, monkeypatch):
    def found(*overrides):
        return [
            f.message
            for f in judge("several_sequences", {}, "rollout.agent_loop=forking", *overrides)
        ]

    mean = "algorithm.loss_aggregation=token_mean"
    with temporary_plugins(Forking):
        assert found(mean) == []
        assert found("algorithm.loss_aggregation=token_sum", "algorithm.advantage=rloo") == []
        for overrides, named in (
            (["algorithm.loss_aggregation=seq_mean_token_mean"], "algorithm.loss_aggregation = seq_mean_token_mean"),
            ([mean, "algorithm.advantage=gae"], "algorithm.advantage = gae"),
            ([mean, "algorithm.kl.in_reward={coef: 0.1}"], "stage kl_penalty"),
            ([mean, "algorithm.overlong_penalty={buffer: 8}"], "stage overlong_penalty"),
        ):  # fmt: skip
            (message,) = found(*overrides)
            assert named in message
            assert "'forking' makes samples of several sequences" in message
        monkeypatch.delattr(Forking, "capabilities")
        gae = (mean, "algorithm.advantage=gae")
        assert found(*gae) == []
        (message,) = found(*gae, "rollout.agent_loop.on_history_change=fork")
        assert "on_history_change: fork" in message
    assert judge("several_sequences", {}, "algorithm.advantage=gae") == []


def test_a_gate_that_was_asked_for_needs_such_an_engine_too(judge, mute):
    (finding,) = judge(
        "logprob_check_never_fires", {"rollout": mute, "algorithm": {"logprob_check": {"every": 5}}}
    )
    assert "algorithm.logprob_check can't measure" in finding.message
    assert judge("logprob_check_never_fires", {"rollout": mute}) == []


def test_the_best_metric_nearest_to_a_misspelt_one_is_named(judge):
    (finding,) = judge(
        "best_metric_unknown",
        {"data": {"val_files": ["v.jsonl"]}},
        "trainer.best_metric=val/gsm8k/maen@4",
        "rollout.validation.n=4",
    )
    assert finding.hint == "set trainer.best_metric=val/gsm8k/mean@4"


def test_keys_of_a_critic_that_an_objective_leaves_without_advantages_are_not_mended_by_gae(judge):
    with temporary_plugins(PlannedObjective):
        (finding,) = judge(
            "critic_unused",
            {},
            "actor.objective=planned",
            "algorithm.advantage=gae",
            "critic.value_clip=0.2",
        )
    assert "actor.objective = planned needs no advantages" in finding.message
    assert "algorithm.advantage=gae" not in finding.hint


def test_an_estimator_and_penalties_that_an_objective_does_not_read_are_named(judge):
    with temporary_plugins(PlannedObjective):
        (finding,) = judge(
            "algorithm_unused",
            {},
            "actor.objective=planned",
            "algorithm.advantage=rloo",
            "algorithm.kl.in_reward={coef: 0.1}",
            "algorithm.overlong_penalty={buffer: 8}",
        )
        assert finding.message.startswith(
            "algorithm.advantage, algorithm.kl.in_reward, algorithm.overlong_penalty: "
        )
        assert judge("algorithm_unused", {}, "actor.objective=planned") == []


@pytest.mark.parametrize(
    ("rule", "overrides"),
    [
        ("kl_twice", ["algorithm.kl={in_loss: {coef: 0.1}, in_reward: {coef: 0.1}}"]),
        ("k1_in_loss", ["algorithm.kl.in_loss={estimator: k1}"]),
        ("loss_aggregation_overridden", ["algorithm.policy_loss=gspo"]),
        (
            "norm_length",
            ["algorithm.loss_aggregation={name: seq_mean_token_sum_norm, length: 64}"],
        ),
        ("group_of_one", ["rollout.n=1"]),
    ],
)
def test_what_an_objective_of_the_actor_leaves_without_effect_is_not_judged(judge, rule, overrides):
    assert judge(rule, {}, *overrides)
    with temporary_plugins(PlannedObjective):
        assert judge(rule, {}, "actor.objective=planned", *overrides) == []


def test_no_rule_has_anything_against_the_defaults():
    assert {rule.name: findings_of(rule.check) for rule in installed_rules()} == {
        rule.name: [] for rule in installed_rules()
    }


def test_rules_that_count_steps_wait_for_the_data(judge):
    assert judge("warmup_too_long", {}, "actor.optim.warmup_steps=10", prompts=None) == []


def test_every_rule_of_core_is_tried_here_and_says_what_it_catches():
    rules = [rule for rule in installed_rules() if rule.distribution == "dovetail-core"]
    elsewhere = {
        "correction_without_log_probs",
        "environment_missing",
        "environment_unfit",
        "file_twice",
        "history_changes",
        "rewrite_unread",
        "rows_left_out",
        "several_sequences",
        "stage_order_unknown",
        "tracker_twice",
        "turn_end_not_stopped",
        "vocabulary_differs",
    }
    assert {rule.name for rule in rules} == CASES.keys() | elsewhere
    assert CASES.keys() == QUIET.keys()
    for rule in rules:
        assert len(rule.doc.split()) > 10
