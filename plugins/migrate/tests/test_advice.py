"""Findings of `dovetail check` about keys of verl and TRL."""

import pytest

from dovetail.config import config_from_mapping
from dovetail.errors import ConfigError
from dovetail_migrate.advice import trl_advice, verl_advice


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
