"""The rules of this package: for each rule a config that it reports, its message, and a config that it accepts."""

from __future__ import annotations

import pytest

from dovetail.interfaces import AgentLoop
from dovetail.sections import EpisodeSection
from dovetail_sdk.testing import PlannedObjective, temporary_plugins
from dovetail_sdk.testing.conformance import RulesConformance

# A batch is 128 prompts and a run 10 steps, unless a case says otherwise.
FOUND = {
    "off_policy_unclipped": [
        (["algorithm.policy_loss=reinforce", "actor.epochs=4"], "warning", "4 updates (actor.epochs = 4"),
        (["algorithm.policy_loss=reinforce", "actor.mini_batch_size=32"], "warning", "actor.mini_batch_size = 32 of data.train_batch_size = 128"),
        (["algorithm.policy_loss=reinforce", "actor.epochs=4", "actor.max_kl=0.1"], "warning", "no ratio"),
        (["actor.epochs=4", "algorithm.policy_loss.clip_high=1000"], "warning", "clip_high = 1000 clips nothing"),
        (["algorithm.policy_loss=reinforce", "actor.epochs=4", "algorithm.rollout_correction=bypass_pg_geo_rs"], "warning", "no ratio"),
    ],
    "max_kl_never_fires": [
        (["actor.max_kl=0.1"], "warning", "a step has only one update"),
        (["actor.max_kl=0.1", "actor.epochs=2", "algorithm.policy_loss=gpg"], "error", "measures no KL"),
    ],
    "loss_aggregation_overridden": [
        (["algorithm.policy_loss=gspo"], "warning", "gspo prescribes seq_mean_token_mean"),
        (["algorithm.policy_loss=sapo"], "warning", "sapo prescribes seq_mean_token_mean"),
        (["algorithm.advantage=dr_grpo"], "warning", "algorithm.advantage = dr_grpo prescribes seq_mean_token_sum_norm"),
    ],
    "clip_range_of_another_loss": [
        (["algorithm.policy_loss={name: gspo, clip_low: 0.2, clip_high: 0.28}"], "warning", "gspo has clip_low = 0.2 and clip_high = 0.28, but it bounds the ratio of a whole sequence"),
        (["algorithm.policy_loss={name: gspo, clip_high: 0.2}"], "warning", "gspo has clip_high = 0.2,"),
        (["algorithm.policy_loss={name: ppo_clip, clip_low: 3e-4, clip_high: 4e-4}"], "warning", "ppo_clip has clip_low = 0.0003 and clip_high = 0.0004, but it bounds each token's ratio"),
        (["algorithm.policy_loss={name: cispo, clip_high: 4e-4}"], "warning", "cispo has clip_high = 0.0004"),
    ],
    "norm_length": [
        (["algorithm.loss_aggregation=seq_mean_token_sum_norm", "data.max_response_length=2048", "data.max_prompt_length=128"], "warning", "algorithm.loss_aggregation.length = 1024, but data.max_response_length = 2048: the loss is 2 times"),
        (["algorithm.advantage=gae", "critic.loss_aggregation={name: seq_mean_token_sum_norm, length: 64}"], "warning", "critic.loss_aggregation.length = 64"),
    ],
    "truncated_log_probs": [
        (["rollout.top_p=0.9", "algorithm.rollout_correction=decoupled_token_is"], "warning", "rollout.top_p = 0.9"),
        (["rollout.top_k=50", "algorithm.policy_loss=dppo"], "warning", "rollout.top_k = 50"),
    ],
    "kl_twice": [
        (["algorithm.kl.in_loss={coef: 0.1}", "algorithm.kl.in_reward={coef: 0.2}"], "warning", "algorithm.kl.in_loss.coef = 0.1 and algorithm.kl.in_reward.coef = 0.2"),
    ],
    "k1_in_loss": [
        (["algorithm.kl.in_loss={estimator: k1}"], "warning", "algorithm.kl.in_loss.estimator = k1 with coef = 0.001"),
    ],
    "group_of_one": [
        (["rollout.n=1"], "error", "rollout.n = 1, but algorithm.advantage = grpo"),
        (["rollout.n=1", "algorithm.advantage={name: grpo, singleton: raw}"], "warning", "there is no baseline"),
    ],
    "filter_without_refill": [
        (["algorithm.sample_filters=[overlong, equal_rewards]"], "warning", "algorithm.sample_filters[1] = equal_rewards drops groups"),
    ],
    "weights_ignored": [
        (["algorithm.rollout_correction=bypass_pg_is"], "warning", "bypass_pg_is computes an importance weight per sequence"),
        (["algorithm.rollout_correction=decoupled_token_is", "algorithm.policy_loss=dppo"], "warning", "decoupled_token_is computes an importance weight per token"),
    ],
    "logprob_check_never_fires": [
        (["algorithm.logprob_check.every=11"], "warning", "algorithm.logprob_check.every = 11 is more than the run's 10 steps"),
        (["algorithm.logprob_check={warn_above: 0.2, stop_above: 0.1}"], "warning", "stops before it has ever warned"),
        (["algorithm.logprob_check={warn_above: 1, stop_above: null}"], "warning", "warn_above = 1 is never exceeded"),
        (["algorithm.logprob_check.stop_above=2"], "warning", "stop_above = 2 is never exceeded"),
        (["algorithm.logprob_check={every: 0, warn_above: 0.005}"], "warning", "bounds have no effect"),
    ],
}  # fmt: skip
SILENT = {
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
        # Both plugins prescribe an aggregation; the loss's has precedence.
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
    "logprob_check_never_fires": [
        [],
        ["trainer.total_steps=3"],
        ["algorithm.logprob_check.every=0"],
        ["algorithm.logprob_check={every: 0, warn_above: 0.005}", "algorithm.rollout_correction=decoupled_token_is"],
        ["algorithm.logprob_check={warn_above: 0.1, stop_above: 0.1}"],
    ],
}  # fmt: skip


class TestRules(RulesConformance):
    distribution = "dovetail-stages"
    found = FOUND
    silent = SILENT
    elsewhere = frozenset({"correction_without_log_probs", "several_sequences"})


def test_a_correction_needs_an_engine_with_log_probabilities(judge, mute):
    rule = "correction_without_log_probs"
    correction = {"algorithm": {"rollout_correction": "decoupled_token_is"}}
    (finding,) = judge(rule, {"rollout": mute, **correction})
    assert finding.severity == "error"
    assert "rollout.name = Mute" in finding.message
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
            assert "'forking' makes" in message
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
