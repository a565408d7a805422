"""Keys and values of TRL's, verl's KL estimators, presets in the wrong place: what a person who writes them is told."""

from __future__ import annotations

import importlib.util

import pytest

from dovetail.config import config_from_mapping
from dovetail.config.aliases import TRL_KEYS, trl_advice
from dovetail.config.explain import explain
from dovetail.config.keys import parse_path


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("num_generations", "rollout.n"),
        ("beta", "algorithm.kl.in_loss.coef"),
        ("algorithm.beta", "algorithm.kl.in_loss.coef"),
        ("epsilon", "algorithm.policy_loss.clip_low and algorithm.policy_loss.clip_high"),
        ("epsilon_high", "algorithm.policy_loss.clip_high"),
        ("scale_rewards", "algorithm.advantage.norm_by_std"),
        ("num_iterations", "actor.epochs"),
        ("rollout.max_completion_length", "data.max_response_length"),
        ("actor.optim.learning_rate", "actor.optim.lr"),
        ("critic.learning_rate", "critic.optim.lr"),
    ],
)
def test_a_key_of_trls_leads_to_dovetails_wherever_it_was_put(problems, theirs, ours):
    (problem,) = problems(None, f"{theirs}=4")
    assert problem == f"{theirs} = 4 (override #1 '{theirs}=4'): this is TRL's key; Dovetail's is {ours}"  # fmt: skip


def test_remarks_tell_where_the_meaning_differs(problems):
    (problem,) = problems({"loss_type": "dr_grpo"})
    assert "algorithm.loss_aggregation.name (" in problem
    assert "dr_grpo is seq_mean_token_sum_norm" in problem


@pytest.mark.parametrize("key", ["actor.optim.epsilon", "rollout.temperature", "nothing.of.theirs"])
def test_a_short_name_deep_in_the_config_and_keys_that_both_have_need_no_advice(key):
    assert trl_advice(parse_path(key)) is None


SERVED = {
    f"rollout.{key}" for key in ("gpu_memory_utilization", "mode", "tensor_parallel_size", "urls")
}
"""Keys of the serving engines alone."""


@pytest.mark.skipif(
    importlib.util.find_spec("dovetail_algorithms") is None, reason="needs the default plugins"
)
@pytest.mark.parametrize("ours", sorted(set(TRL_KEYS.values())))
def test_every_key_that_the_advice_names_exists(ours):
    chosen = {"gdpo": {"advantage": "gdpo"}}
    plugins = {plugin: algorithm for plugin, algorithm in chosen.items() if f"of {plugin}" in ours}
    algorithm = next(iter(plugins.values()), {})
    loaded = config_from_mapping({"model": {"path": "x"}, "algorithm": algorithm})
    for part in ours.split(" and "):
        key = part.partition(" ")[0].rstrip(",")
        if key not in SERVED:
            assert explain(loaded, key).key == key


@pytest.mark.parametrize("override", ["preset=dapo", "preset.name=dapo", "algorithm.name=dapo", "algorithm=dapo"])  # fmt: skip
def test_a_preset_in_the_wrong_place_leads_to_its_key(problems, override):
    assert any(
        problem.endswith("a preset is chosen by algorithm.preset=dapo")
        for problem in problems(None, override)
    )


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
def test_verls_name_of_a_kl_estimator_leads_to_dovetails(problems, build, where, theirs, ours):
    (problem,) = problems(None, f"algorithm.kl.{where}.estimator={theirs}")
    assert problem.endswith(f'; verl\'s "{theirs}" is "{ours}"')
    assert "did you mean" not in problem
    build(None, f"algorithm.kl.{where}.estimator={ours}")


def test_a_misspelt_estimator_still_gets_the_nearest(problems):
    (problem,) = problems(None, "algorithm.kl.in_loss.estimator=K3")
    assert problem.endswith('did you mean "k3"?')


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("false", "write algorithm.kl.in_loss=null for no penalty"),
        ("true", "write algorithm.kl.in_loss.coef= and the weight of the penalty"),
        ("0.01", "write algorithm.kl.in_loss.coef=0.01"),
        ("low_var_kl", "write algorithm.kl.in_loss.estimator=k3"),
        ("k1", "write algorithm.kl.in_loss.estimator=k1"),
    ],
)
def test_a_single_value_for_a_kl_penalty_is_told_which_key_it_is(problems, value, advice):
    (problem,) = problems(None, f"algorithm.kl.in_loss={value}")
    assert problem.endswith(f"; {advice}")
