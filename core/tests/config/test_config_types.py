"""Types are strict, and every error comes at once, with key, value, layer and remedy."""

from __future__ import annotations

import math

import pytest


@pytest.mark.parametrize(
    ("mapping", "facts"),
    [
        ({"rollout": {"n": "3"}}, 'rollout.n = "3"|int|text|write 3'),
        ({"rollout": {"n": True}}, 'rollout.n = true|int|bool'),
        ({"rollout": {"n": 8.0}}, 'rollout.n = 8.0|int|float|write 8'),
        ({"rollout": {"n": 0}}, 'rollout.n = 0|>= 1'),
        ({"rollout": {"n": 10**20}}, 'rollout.n = 100000000000000000000|<= 1048576'),
        ({"rollout": {"validation": {"n": 2**20 + 1}}}, 'rollout.validation.n = 1048577|<= 1048576'),
        ({"rollout": {"replicas": 10**20}}, 'rollout.replicas|<= 1048576'),
        ({"data": {"train_batch_size": 10**20}, "actor": {"mini_batch_size": 3}}, 'data.train_batch_size|<= 1048576'),
        ({"actor": {"mini_batch_size": 10**20}}, 'actor.mini_batch_size|<= 1048576'),
        ({"critic": {"epochs": 10**20}}, 'critic.epochs|<= 1048576'),
        ({"data": {"max_response_length": 10**20}}, 'data.max_response_length|<= 16777216'),
        ({"seed": -1}, 'seed = -1|>= 0'),
        ({"seed": 2**63}, 'seed = 9223372036854775808|< 9223372036854775808'),
        ({"actor": {"optim": {"lr": "nan"}}}, 'actor.optim.lr = "nan"|float|text'),
        ({"actor": {"optim": {"lr": math.inf}}}, 'actor.optim.lr = Infinity|float32'),
        ({"actor": {"optim": {"lr": 1e39}}}, 'actor.optim.lr = 1e+39|float32'),
        ({"actor": {"max_kl": -math.inf}}, 'actor.max_kl = -Infinity|float or null|float32'),
        ({"actor": {"optim": {"betas": [0.9, math.nan]}}}, 'actor.optim.betas[1] = NaN|float32'),
        ({"rollout": {"n": None}}, 'rollout.n = null|int'),
        ({"rollout": {"top_p": True}}, 'rollout.top_p = true|float|bool'),
        ({"rollout": {"ignore_eos": "yes"}}, 'rollout.ignore_eos = "yes"|bool|text|write true'),
        ({"rollout": {"ignore_eos": 1}}, 'rollout.ignore_eos = 1|bool|int|write true'),
        ({"rollout": {"stop": "END"}}, 'rollout.stop = "END"|list of str|write [END]'),
        ({"rollout": {"stop_token_ids": [1, "2"]}}, 'rollout.stop_token_ids[1] = "2"|int|write 2'),
        ({"rollout": {"validation": {"top_p": 1.5}}}, 'rollout.validation.top_p = 1.5|<= 1'),
        ({"experiment": 3}, 'experiment = 3|str|int|write "3"'),
        ({"actor": {"optim": {"betas": [0.9]}}}, 'actor.optim.betas = [0.9]|2 values|got 1'),
        ({"actor": {"mini_batch_size": "all"}}, 'actor.mini_batch_size = "all"|int or null'),
        ({"actor": None}, 'actor = null|optim, max_tokens_per_micro_batch'),
        ({"actor": 3}, 'actor = 3|optim, max_tokens_per_micro_batch|got int'),
        ({"model": {"path": "x", "dtype": 16}}, 'model.dtype = 16|"float32", "bfloat16"|int'),
        ({"data": {"val_batch_size": "8"}}, 'data.val_batch_size = "8"|int or null|write 8'),
        ({"model": {"path": "x", "dtype": "float16"}}, 'model.dtype = "float16"|"float32"|mean "bfloat16"'),
        ({"model": {"path": "x", "dtype": "bf16"}}, 'model.dtype = "bf16"|"float32"|mean "bfloat16"'),
        ({"model": {}}, 'model.path|required'),
        ({"reward": {"manager": {"name": "wrap", "mode": "fats"}}}, 'reward.manager.mode = "fats"|"exact"|mean "fast"'),
        ({"reward": {"manager": {"name": "wrap", "limit": 1.5}}}, 'reward.manager.limit = 1.5|int or str|write "1.5"'),
        ({"tracking": "console"}, 'tracking = "console"|name, path, attribute|write [console]'),
        ({"algorithm": {"policy_loss": {"clip_low": 0.5}}}, 'algorithm.policy_loss|clip_low|clip_high'),
        ({"algorithm": {"policy_loss": {"clip_high": 2.0}}}, 'algorithm.policy_loss|clip_high|set it below 1'),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_with_the_remedy(problems, mapping, facts):
    """The facts are parted by `|`; the first is the key, with the value where that is shown, and begins the message."""
    (problem,) = problems(mapping)
    key, *others = facts.split("|")
    assert problem.startswith(key)
    assert [fact for fact in others if fact not in problem] == []


def test_the_largest_seed_and_counts_are_taken(build):
    config = build({"seed": 2**63 - 1, "rollout": {"n": 2**20}}).config
    assert (config.seed, config.rollout.n) == (2**63 - 1, 2**20)


def test_a_whole_number_is_a_float_but_nothing_else_is_converted(build):
    config = build({"rollout": {"temperature": 1}, "actor": {"optim": {"betas": [0, 1]}}}).config
    assert type(config.rollout.temperature) is float
    assert config.actor.optim.betas == (0.0, 1.0)
    assert all(type(beta) is float for beta in config.actor.optim.betas)


def test_yaml_text_has_the_scalars_of_yaml_1_2(load):
    config = load(
        "model: {path: 2024-01-01}\n"
        "experiment: on\n"
        "actor: {optim: {lr: 1e-6, eps: 1E-9}}\n"
        "seed: 010\n"
        "trainer: {deterministic: true}\n"
    ).config
    assert config.model.path == "2024-01-01"
    assert config.experiment == "on"
    assert (config.actor.optim.lr, config.actor.optim.eps) == (1e-6, 1e-9)
    assert config.seed == 10
    assert config.trainer.deterministic is True


def test_every_problem_comes_at_once_in_the_order_of_the_sections(problems):
    found = problems(
        {
            "seed": "1",
            "rollout": {"name": "vlm", "n": 0, "tensor_parallel_size": 2},
            "actor": {"optim": {"lr": -1, "learning_rate": 3}},
            "trainer": {"total_epochs": 0, "total_step": 3},
        },
        "tracking[0]=consol",
    )
    keys = {problem.split(" ")[0].rstrip(":") for problem in found}
    assert keys == {
        "seed",
        "rollout.name",
        "rollout.n",
        "actor.optim.lr",
        "actor.optim.learning_rate",
        "trainer.total_epochs",
        "trainer.total_step",
        "tracking[0].name",
    }


@pytest.mark.parametrize(
    ("mapping", "key", "expected"),
    [
        ({"rolout": {"n": 3}}, "rolout (", "mean rollout?"),
        ({"data": {"max_prompt_lenght": 3}}, "data.max_prompt_lenght = 3", "mean data.max_prompt_length?"),
        ({"lr": 0.1}, "lr = 0.1", "mean actor.optim.lr or critic.optim.lr?"),
        ({"rollout": {"max_response_length": 3}}, "rollout.max_response_length = 3", "mean data.max_response_length or rollout.validation.max_response_length?"),
        ({"actor": {"lora": {"rank": 3}}}, "actor.lora (", "mean actor.engine.lora?"),
        ({"model": {"path": "x", "lora": {"rank": 3}}}, "model.lora (", "mean actor.engine.lora?"),
        ({"trainer": {"every": 3}}, "trainer.every = 3", "mean trainer.save_every?"),
        ({"algorithm": {"entropy": {"zzz": 3}}}, "algorithm.entropy.zzz = 3", "algorithm.entropy has coef, measure"),
        ({"rollout": {"tensor_parallel_size": 2}}, "rollout.tensor_parallel_size = 2", ""),
    ],
)  # fmt: skip
def test_an_unknown_key_names_the_nearest_one(problems, mapping, key, expected):
    (problem,) = problems(mapping)
    assert problem.startswith(key)
    assert "unknown key" in problem
    assert problem.endswith(expected)
