"""What the plan says of the chosen algorithm: the loss with its bounds, the aggregation, penalties, what is changed; who computes what."""

from __future__ import annotations

import pytest

from dovetail.config import config_from_mapping
from dovetail.planning.plan import Plan, make_plan


def planned(*overrides: str) -> Plan:
    return make_plan(config_from_mapping({"model": {"path": "tiny"}}, overrides).config)


def because(stage: str, *overrides: str) -> str:
    return next(found.because for found in planned(*overrides).stages if found.name == stage)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.policy_loss.clip_high=0.28"], "ppo_clip (clip_low 0.2, clip_high 0.28, dual_clip 3), token_mean; every step"),
        (["algorithm.policy_loss=gspo"], "gspo (clip_low 0.0003, clip_high 0.0004), token_mean; every step"),
        (["algorithm.policy_loss=dppo"], "dppo (divergence total_variation), token_mean; every step"),
        (["algorithm.loss_aggregation=seq_mean_token_sum_norm"], ", seq_mean_token_sum_norm (length 1024); every step"),
        (["algorithm.kl.in_loss={}"], ", token_mean, KL k3 0.001 in"),
        (["algorithm.kl.in_loss={controller: adaptive}"], "KL k3 0.001 (adaptive) in the loss"),
        (["algorithm.entropy.coef=0.01"], ", token_mean, entropy bonus 0.01; every step"),
        (["algorithm.rollout_correction=bypass_pg_is", "algorithm.policy_loss=reinforce"], "reinforce, token_mean, corrected by bypass_pg_is; every step"),
    ],
)  # fmt: skip
def test_the_update_names_what_it_minimises(overrides: list[str], words: str) -> None:
    assert words in because("update_actor", *overrides)


def test_parts_of_an_objective_are_named_as_in_the_config() -> None:
    said = because("update_actor", "actor.objective={name: policy, policy_loss: gspo, kl: k3}")
    assert said.startswith("policy (policy_loss gspo, loss_aggregation token_mean, kl k3,")


def test_a_penalty_without_weight_is_not_named() -> None:
    assert "KL" not in because("update_actor", "algorithm.kl.in_loss={coef: 0}")


def test_one_update_a_rollout_says_that_nothing_is_clipped() -> None:
    words = "every ratio is 1, and no clip acts"
    assert because("update_actor").endswith(words)
    assert words not in because("update_actor", "actor.epochs=2")
    assert words not in because("update_actor", "algorithm.policy_loss=reinforce")
    assert words not in because("update_actor", "algorithm.policy_loss=sapo")


def test_the_advantage_names_its_estimator_and_settings_that_differ_from_defaults() -> None:
    assert because("advantage").startswith("grpo; ")
    changed = because("advantage", "algorithm.advantage={name: grpo, norm_by_std: false}")
    assert changed.startswith("grpo (norm_by_std off); ")
    gae = because("advantage", "algorithm.advantage={name: gae, gamma: 0.99, lam: 1.0}")
    assert gae.startswith("gae (gamma 0.99); ")


def test_the_critic_names_its_bound_and_aggregation() -> None:
    words = because("update_critic", "algorithm.advantage=gae", "critic.value_clip=0.3")
    assert words.endswith("; value_clip 0.3, token_mean")
    none = because("update_critic", "algorithm.advantage=gae", "critic.value_clip=null")
    assert none.endswith("; unclipped, token_mean")


PENALTIES = (
    "algorithm.overlong_penalty={buffer: 64, factor: 0.5}",
    "algorithm.kl.in_reward={coef: 0.01}",
)


def test_the_stages_of_penalties_name_their_weights() -> None:
    assert "(buffer 64, factor 0.5)" in because("overlong_penalty", *PENALTIES)
    assert "algorithm.kl.in_reward (k1 0.01)" in because("kl_penalty", *PENALTIES)


def test_each_stage_that_rewrites_rewards_makes_a_version_that_the_next_one_reads() -> None:
    reads = {stage.name: stage.reads.get("token_rewards") for stage in planned(*PENALTIES).stages}
    assert (reads["overlong_penalty"], reads["kl_penalty"], reads["advantage"]) == (1, 2, 3)


LORA = ("actor.engine={name: fsdp2, lora: {}}", "algorithm.kl.in_loss={coef: 0.001}")


@pytest.mark.parametrize(
    ("overrides", "scores"),
    [
        (LORA, {"score_actor": {"ref_log_probs"}}),
        ((*LORA, "actor.epochs=2"), {"score_actor": {"old_log_probs", "ref_log_probs"}}),
        (("actor.epochs=2",), {"score_actor": {"old_log_probs"}}),
        ((LORA[1],), {"score_ref": {"ref_log_probs"}}),
        (
            (LORA[1], "actor.epochs=2"),
            {"score_actor": {"old_log_probs"}, "score_ref": {"ref_log_probs"}},
        ),
    ],
)
def test_each_role_has_one_pass_for_all_that_is_required_of_it(
    overrides: tuple[str, ...], scores: dict[str, set[str]]
) -> None:
    plan = planned(*overrides)
    stages = {stage.name: stage for stage in plan.stages if stage.phase == "score"}
    assert {name: stage.provides for name, stage in stages.items()} == scores
    for name, stage in stages.items():
        role = name.removeprefix("score_")
        assert stage.roles == (role,)
        assert stage.who == f"{role} (fsdp2)"
    assert ("ref" in {model.role for model in plan.models}) == ("score_ref" in scores)


def test_a_pass_of_the_actor_says_that_its_adapters_are_off_for_the_reference() -> None:
    assert "adapters off" in because("score_actor", *LORA)
    assert "adapters" not in because("score_actor", "actor.epochs=2")


def test_a_pass_for_other_columns_alone_does_not_claim_the_log_probabilities() -> None:
    plan = planned(
        "algorithm.advantage=optimal_token_baseline",
        "algorithm.rollout_correction=bypass_ppo_clip",
    )
    provided = {stage.name: stage.provides for stage in plan.stages}
    assert provided["score_actor"] == {"sum_pi_squared"}
    assert provided["old_log_probs_from_rollout"] == {"old_log_probs"}


def test_every_requirement_names_what_requires_it() -> None:
    plan = planned("algorithm.advantage=gae", LORA[1])
    assert "'gae'" in plan.facts.required["values"]
    assert plan.facts.required["ref_log_probs"] == "algorithm.kl.in_loss"
    assert "old_log_probs" not in plan.facts.required
    for model, words in (("critic", "'gae'"), ("ref", "algorithm.kl.in_loss")):
        assert words in next(found.because for found in plan.models if found.role == model)


@pytest.mark.parametrize(
    ("steps", "words"), [(1, "1 (1 optimizer step)"), (3, "3 (3 optimizer steps)")]
)
def test_one_step_is_not_several(steps: int, words: str) -> None:
    overrides = [f"trainer.total_steps={steps}"]
    plan = planned(*overrides)
    assert dict(plan.counts.rows())["steps"] == words
