"""Every rule: a config that it reports, its message, and a config that it accepts."""

from __future__ import annotations

from dovetail.plugins.rules import installed_rules
from dovetail_sdk.testing import PlannedObjective, findings_of, temporary_plugins
from dovetail_sdk.testing.conformance import RulesConformance

# A batch is 128 prompts and a run 10 steps, unless a case says otherwise.
FOUND = {
    "token_budget": [
        (["algorithm.advantage=gae", "critic.max_tokens_per_micro_batch=2047"], "error", "1024 + 1024 = 2048"),
    ],
    "rollout_too_short": [
        (["rollout={name: vllm, max_model_len: 2047}"], "error", "rollout.max_model_len = 2047 is too short for one sample"),
    ],
    "warmup_too_long": [
        (["actor.optim.warmup_steps=10"], "warning", "actor.optim.warmup_steps = 10, but the run has 10 optimizer steps"),
        (["actor.optim.warmup_steps=1", "trainer.total_steps=1"], "warning", "the run has 1 optimizer step of the actor"),
        (["algorithm.advantage=gae", "critic.optim.warmup_steps=99"], "warning", "critic.optim.warmup_steps = 99"),
        (["algorithm.advantage=gae", "critic.warmup_steps=10"], "error", "the policy would never be trained"),
    ],
    "long_penalty_buffer": [
        (["algorithm.overlong_penalty={buffer: 2000}"], "error", "even an empty response"),
        (["algorithm.overlong_penalty={buffer: 1024}"], "warning", "every token of a response"),
    ],
    "rollout_unused": [
        (["trainer.name=supervised", "actor.objective=nll", "rollout.n=4", "rollout.validation.n=2", "reward.function=exact_match", "algorithm.kl.in_loss={coef: 0.1}", "algorithm.logprob_check.every=5", "data.val_batch_size=8"], "warning", "rollout.n, rollout.validation, reward.function, algorithm.kl.in_loss, algorithm.logprob_check.every, data.val_batch_size: these keys have no effect: trainer supervised trains on conversations"),
        (["trainer.name=supervised", "actor.objective=nll", "rollout.name=vllm"], "warning", "rollout.name: these keys have no effect: trainer supervised"),
        (["trainer.name=supervised", "actor.objective=nll", "reward.manager.workers=2"], "warning", "reward.manager.workers: these keys have no effect: trainer supervised"),
    ],
    "critic_unused": [
        (["critic.value_clip=0.2", "critic.optim.lr=1.0e-4", "critic.loss_aggregation=token_sum"], "warning", "critic.optim.lr, critic.value_clip, critic.loss_aggregation: these keys have no effect: the run has no critic"),
    ],
    "algorithm_unused": [
        (["actor.objective=policy", "algorithm.kl.in_loss={coef: 0.1}", "algorithm.policy_loss.clip_high=0.3"], "warning", "algorithm.policy_loss, algorithm.kl.in_loss: these keys have no effect: the actor minimises actor.objective = policy"),
        (["actor.objective=policy", "algorithm.loss_aggregation=token_sum", "algorithm.entropy.coef=0.1"], "warning", "algorithm.loss_aggregation, algorithm.entropy.coef:"),
    ],
    "profile_misses_the_run": [
        (["profile={tool: torch, steps: [9, 12]}"], "warning", "only steps 9 to 10 are recorded"),
        (["profile={tool: torch, steps: [10, 12]}"], "warning", ": only step 10 is recorded"),
        (["profile={tool: torch, steps: [11, 12]}"], "warning", "exceeds the run's 10 steps: nothing is recorded"),
        (["profile={tool: torch, roles: [critic]}"], "warning", "'critic', which this run does not have"),
        (["profile={tool: memory}", "runtime={name: inline, device: cpu}"], "error", "profile.tool=memory"),
        (["profile={tool: nsys}", "runtime.name=ray"], "error", "profile.tool=nsys"),
        (["profile={tool: torch, ranks: [0, 3]}"], "warning", "actor has 1 rank: nothing is recorded for [3]"),
    ],
}  # fmt: skip
SILENT = {
    "rollout_too_short": [
        ["rollout.name=vllm"],
        ["rollout={name: vllm, max_model_len: 2048}"],
        [],
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
    "profile_misses_the_run": [
        [],
        ["profile.steps=[11,12]"],
        ["profile={tool: torch, steps: [10, 10]}"],
        ["profile={tool: memory}", "runtime={name: ray, gpus_per_node: 2}"],
        ["profile={tool: torch, roles: [actor, critic]}", "algorithm.advantage=gae"],
    ],
}  # fmt: skip


class TestRules(RulesConformance):
    distribution = "dovetail-preflight"
    found = FOUND
    silent = SILENT
    elsewhere = frozenset(
        {
            "environment_missing",
            "environment_unfit",
            "file_twice",
            "rewrite_unread",
            "rows_left_out",
            "stage_order_unknown",
            "tracker_twice",
            "vocabulary_differs",
        }
    )


def test_keys_of_a_critic_that_an_objective_leaves_without_advantages_are_not_mended_by_gae(judge):
    with temporary_plugins(PlannedObjective):
        (finding,) = judge(
            "critic_unused",
            {},
            "actor.objective=planned",
            "algorithm.advantage=gae",
            "critic.value_clip=0.2",
        )
    assert "actor.objective = planned" in finding.message
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


def test_no_rule_has_anything_against_the_defaults():
    assert {rule.name: findings_of(rule.check) for rule in installed_rules()} == {
        rule.name: [] for rule in installed_rules()
    }


def test_rules_that_count_steps_wait_for_the_data(judge):
    assert judge("warmup_too_long", {}, "actor.optim.warmup_steps=10", prompts=None) == []
