"""What the plan says of the chosen algorithm: the loss with its bounds, the aggregation, penalties, what is changed."""

from __future__ import annotations

import pytest

from dovetail.config import config_from_mapping
from dovetail.planning.plan import make_plan


def because(stage: str, *overrides: str) -> str:
    plan = make_plan(config_from_mapping({"model": {"path": "tiny"}}, overrides).config)
    return next(found.because for found in plan.stages if found.name == stage)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.policy_loss.clip_high=0.28"], "ppo_clip (clip_low 0.2, clip_high 0.28, dual_clip 3), token_mean; every step"),
        (["algorithm.policy_loss=gspo"], "gspo (clip_low 0.0003, clip_high 0.0004), token_mean; every step"),
        (["algorithm.policy_loss=dppo"], "dppo (divergence total_variation), token_mean; every step"),
        (["algorithm.loss_aggregation=seq_mean_token_sum_norm"], ", seq_mean_token_sum_norm (length 1024); every step"),
        (["algorithm.kl.in_loss={}"], ", token_mean, KL k3 0.001 in the loss; every step"),
        (["algorithm.kl.in_loss={controller: adaptive}"], "KL k3 0.001 (adaptive) in the loss"),
        (["algorithm.entropy.coef=0.01"], ", token_mean, entropy bonus 0.01; every step"),
        (["algorithm.rollout_correction=bypass_pg_is", "algorithm.policy_loss=reinforce"], "reinforce, token_mean, corrected by bypass_pg_is; every step"),
    ],
)  # fmt: skip
def test_the_update_names_what_it_minimises(overrides: list[str], words: str) -> None:
    assert words in because("update", *overrides)


def test_a_penalty_without_weight_is_not_named() -> None:
    assert "KL" not in because("update", "algorithm.kl.in_loss={coef: 0}")


def test_one_update_a_rollout_says_that_nothing_is_clipped() -> None:
    words = "every ratio is 1, and no clip acts"
    assert because("update").endswith(words)
    assert words not in because("update", "actor.epochs=2")
    assert words not in because("update", "algorithm.policy_loss=reinforce")
    assert words not in because("update", "algorithm.policy_loss=sapo")


def test_the_advantage_names_the_settings_that_differ_from_their_defaults() -> None:
    assert because("advantage") == "every step"
    changed = because("advantage", "algorithm.advantage={name: grpo, norm_by_std: false}")
    assert changed == "grpo (norm_by_std off); every step"
    gae = because("advantage", "algorithm.advantage={name: gae, gamma: 0.99, lam: 1.0}")
    assert gae == "gae (gamma 0.99); every step"


def test_the_critic_names_its_bound_and_aggregation() -> None:
    words = because("update_critic", "algorithm.advantage=gae", "critic.value_clip=0.3")
    assert words.endswith("; value_clip 0.3, token_mean")
    none = because("update_critic", "algorithm.advantage=gae", "critic.value_clip=null")
    assert none.endswith("; unclipped, token_mean")


def test_shaping_names_its_weights() -> None:
    overrides = (
        "algorithm.overlong_penalty={buffer: 64, factor: 0.5}",
        "algorithm.kl.in_reward={coef: 0.01}",
    )
    assert because("shaping", *overrides) == (
        "algorithm.overlong_penalty (buffer 64, factor 0.5), algorithm.kl.in_reward (k1 0.01)"
    )


LORA = ("actor.engine={name: fsdp2, lora: {}}", "algorithm.kl.in_loss={coef: 0.001}")


@pytest.mark.parametrize(
    ("overrides", "name", "who"),
    [
        (LORA, "ref_log_probs", "actor (fsdp2), its adapters off"),
        (
            (*LORA, "actor.epochs=2"),
            "old_and_ref_log_probs",
            "actor (fsdp2), its adapters off for ref_log_probs",
        ),
        (("actor.epochs=2",), "old_log_probs", "actor (fsdp2)"),
        ((LORA[1],), "ref_log_probs", "ref (fsdp2)"),
    ],
)
def test_a_stage_is_named_after_what_it_computes(
    overrides: tuple[str, ...], name: str, who: str
) -> None:
    plan = make_plan(config_from_mapping({"model": {"path": "tiny"}}, overrides).config)
    (stage,) = [stage for stage in plan.stages if stage.name.endswith("log_probs")]
    assert (stage.name, stage.who) == (name, who)
    assert stage.provides == {
        column
        for column in ("old_log_probs", "ref_log_probs")
        if column.split("_")[0] in name.split("_")
    }


def test_a_pass_for_other_columns_alone_does_not_claim_the_log_probabilities() -> None:
    overrides = (
        "algorithm.advantage=optimal_token_baseline",
        "algorithm.rollout_correction=bypass_ppo_clip",
    )
    plan = make_plan(config_from_mapping({"model": {"path": "tiny"}}, overrides).config)
    assert plan.has_stage("sum_pi_squared")
    assert not plan.has_stage("old_log_probs")


@pytest.mark.parametrize(
    ("steps", "words"), [(1, "1 (1 optimizer step)"), (3, "3 (3 optimizer steps)")]
)
def test_one_step_is_not_several(steps: int, words: str) -> None:
    overrides = [f"trainer.total_steps={steps}"]
    plan = make_plan(config_from_mapping({"model": {"path": "tiny"}}, overrides).config)
    assert dict(plan.counts.rows())["steps"] == words
