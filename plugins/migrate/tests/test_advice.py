"""Findings of `dovetail check` about keys of verl and TRL."""

import pytest

from dovetail.config import config_from_mapping
from dovetail.errors import ConfigError
from dovetail_migrate.advice import kl_advice, trl_advice, verl_advice


@pytest.mark.parametrize(
    "key",
    [
        "algorithm.adv_estimator",
        "actor_rollout_ref.actor.clip_ratio_c",
        "actor_rollout_ref.nothing.of.verls",
        "critic.cliprange_value",
        "trainer.test_freq",
        "reward_model.reward_manager",
        "data.apply_chat_template_kwargs",
        "async_training.staleness_threshold",
    ],
)
def test_a_key_of_verls_names_the_import(key):
    assert "dovetail import verl" in (verl_advice(key, "1") or "")


@pytest.mark.parametrize(("key", "ours"), [("trainer.project_name", "project"), ("actor_rollout_ref.rollout.n", "rollout.n")])  # fmt: skip
def test_a_key_that_means_the_same_is_named_too(key, ours):
    assert f"use {ours};" in (verl_advice(key, "1") or "")


def test_a_key_that_needs_nothing_says_why():
    assert "micro-batches are always limited by tokens" in (verl_advice("actor_rollout_ref.actor.use_dynamic_bsz", "true") or "")  # fmt: skip


@pytest.mark.parametrize("key", ["data.no_such", "trainr.total_epochs", "algorithm"])
def test_other_keys_are_not_claimed(key):
    assert verl_advice(key, "1") is None
    assert trl_advice(key, "1") is None


@pytest.mark.parametrize("key", ["defaults", "hydra.searchpath", "algorithm._target_"])
def test_hydras_keys_are_to_be_left_out(key):
    assert "leave it out" in (verl_advice(key, "1") or "")


@pytest.mark.parametrize(("key", "ours"), [("num_generations", "rollout.n"), ("rollout.max_completion_length", "data.max_response_length"), ("beta", "algorithm.kl.in_loss.coef")])  # fmt: skip
def test_a_key_of_trls_leads_to_dovetails_wherever_it_was_put(key, ours):
    assert ours in (trl_advice(key, "4") or "")
    assert "dovetail import trl" in (trl_advice(key, "4") or "")


def test_a_config_with_keys_of_both_names_both_imports():
    with pytest.raises(ConfigError) as caught:
        config_from_mapping({"model": {"path": "x"}, "algorithm": {"adv_estimator": "grpo"}, "num_generations": 4})  # fmt: skip
    text = "\n".join(caught.value.problems)
    assert "dovetail import verl" in text
    assert "dovetail import trl" in text


@pytest.mark.parametrize(
    ("where", "theirs", "ours"),
    [
        ("in_loss", "low_var_kl", "k3"),
        ("in_loss", "low_var_kl+", "k3+"),
        ("in_loss", "kl", "k1"),
        ("in_loss", "kl+", "k1+"),
        ("in_loss", "mse", "k2"),
        ("in_reward", "low_var_kl", "k3"),
        ("in_reward", "kl+", "k1"),
    ],
)
def test_verls_name_of_a_kl_estimator_leads_to_dovetails(where, theirs, ours):
    problem = problem_of({where: {"estimator": theirs}})
    assert problem.endswith(f'; verl\'s "{theirs}" is "{ours}"')
    assert "did you mean" not in problem
    config_from_mapping({"model": {"path": "x"}, "algorithm": {"kl": {where: {"estimator": ours}}}})


@pytest.mark.parametrize("estimator", ["K3", "k3++"])
def test_a_misspelt_estimator_of_dovetails_is_not_claimed(estimator):
    assert kl_advice("algorithm.kl.in_loss.estimator", estimator) is None


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (False, "write algorithm.kl.in_loss=null for no penalty"),
        (True, "write algorithm.kl.in_loss.coef=WEIGHT, the weight of the penalty"),
        (0.01, "write algorithm.kl.in_loss.coef=0.01"),
        (1e-05, "write algorithm.kl.in_loss.coef=1e-05"),
        ("low_var_kl", "write algorithm.kl.in_loss.estimator=k3"),
        ("k3+", "write algorithm.kl.in_loss.estimator=k3+"),
    ],
)
def test_a_single_value_for_a_kl_penalty_is_told_which_key_it_is(value, advice):
    assert problem_of({"in_loss": value}).endswith(f"; {advice}")


def problem_of(kl):
    with pytest.raises(ConfigError) as caught:
        config_from_mapping({"model": {"path": "x"}, "algorithm": {"kl": kl}})
    (problem,) = caught.value.problems
    return problem
