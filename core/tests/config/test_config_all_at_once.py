"""All that is wrong with a config is told in one error: files and overrides together, a line for each key."""

from __future__ import annotations

import attrs
import pytest

from dovetail.errors import ConfigError
from dovetail.sections import PluginSection

_THEIRS = ("actor_rollout_ref.", "algorithm.kl_ctrl.", "reward_model.reward_manager", "trainer.logger", "trainer.save_freq", "trainer.default_local_dir")  # fmt: skip


@pytest.fixture(autouse=True)
def advice(monkeypatch):
    """A package that knows another system's keys."""

    def advise(key, value):
        return f"theirs: {key} of {value}" if key.startswith(_THEIRS) else None

    monkeypatch.setattr("dovetail.config.aliases._advisers", lambda _: (advise,))


def keys(problems):
    """The keys that problems are about."""
    return [problem.partition(" ")[0] for problem in problems]


def test_overrides_of_one_unknown_section_are_all_told(problems):
    found = problems(
        None,
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "algorithm.kl_ctrl.type=fixed",
        "algorithm.kl_ctrl.kl_coef=0.1",
    )
    assert [problem.partition("): ")[2] for problem in found] == [
        "theirs: algorithm.kl_ctrl.type of fixed",
        "theirs: algorithm.kl_ctrl.kl_coef of 0.1",
        "theirs: actor_rollout_ref.rollout.n of 4",
        "theirs: actor_rollout_ref.actor.ppo_epochs of 2",
        "theirs: actor_rollout_ref.actor.optim.lr of 1e-06",
    ]
    assert "(override #2 'actor_rollout_ref.actor.ppo_epochs=2')" in found[3]


def test_files_and_overrides_each_tell_where_they_give_a_key(load):
    with pytest.raises(ConfigError) as caught:
        load(
            "model: {path: x}\nactor_rollout_ref:\n  actor: {grad_clip: 1.0}\n  rollout: {n: 4}\n",
            "actor_rollout_ref:\n  rollout: {n: 5}\n",
            overrides=("actor_rollout_ref.ref.strategy=fsdp2", "trainer.save_freq=2"),
        )
    assert keys(caught.value.problems) == [
        "trainer.save_freq",
        "actor_rollout_ref.actor.grad_clip",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.ref.strategy",
    ]
    origins = ("override #2", "a.yaml:3", "b.yaml:2", "override #1")
    for problem, origin in zip(caught.value.problems, origins, strict=True):
        assert origin in problem


def test_keys_beside_one_that_is_known_from_elsewhere_are_told_too(problems):
    found = problems(
        {
            "reward_model": {
                "reward_manager": "naive",
                "odd": {"one": 1},
                "more": {"one": 1, "two": 2},
                "other": {},
            }
        }
    )
    assert found == (
        'reward_model.reward_manager = "naive" (mapping): theirs: reward_model.reward_manager of naive',
        "reward_model.odd.one = 1 (mapping): unknown key; Dovetail has no key of that name",
        "reward_model.more (mapping): unknown key; Dovetail has no key of that name",
        "reward_model.other = {} (mapping): unknown key; Dovetail has no key of that name",
    )


def test_a_key_whose_value_is_a_list_is_one_key(problems):
    found = problems(
        {"trainer": {"logger": ["console", "wandb"]}},
        "actor_rollout_ref.model.target_modules=[q_proj,v_proj]",
    )
    assert [problem.partition("theirs: ")[2] for problem in found] == [
        "trainer.logger of ['console', 'wandb']",
        "actor_rollout_ref.model.target_modules of ['q_proj', 'v_proj']",
    ]


def test_the_value_of_an_unknown_key_is_told_as_it_stands(problems):
    (problem,) = problems(None, "trainer.default_local_dir=out/${trainer.project_name}")
    assert problem.startswith(
        'trainer.default_local_dir = "out/${trainer.project_name}" (override #1'
    )
    assert problem.endswith("): theirs: trainer.default_local_dir of out/${trainer.project_name}")
    (problem,) = problems(None, "trainer.default_local_dir={out")
    assert problem.startswith('trainer.default_local_dir = "{out" (override #1')
    (problem,) = problems(None, "strange[0].first=1", "strange[1]=2")
    assert problem.startswith(
        "strange (override #1 'strange[0].first=1', override #2 'strange[1]=2'): unknown key; "
    )


def test_a_sign_before_a_key_hides_nothing_that_is_wrong_with_it(problems, build):
    sign, key = problems(None, "+actor_rollout_ref.rollout.n=4")
    assert sign.endswith("write actor_rollout_ref.rollout.n=4")
    assert key.startswith(
        "actor_rollout_ref.rollout.n = 4 (override #1 '+actor_rollout_ref.rollout.n=4'): "
    )
    (sign,) = problems(None, "++rollout.n=4")
    assert sign.endswith("the sign '+' before a key has no meaning here; write rollout.n=4")
    (sign,) = problems(None, "~data.custom_cls=1")
    assert sign.endswith("write data.custom_cls=1 (null unsets a value)")


def test_what_a_section_has_is_said_once(problems):
    found = problems({"trainer": {"zzz": 1, "total_steps": 0, "qqqq": 2}, "data": {"zzz": 3}})
    assert [problem.partition(": ")[2].partition(", ")[0] for problem in found] == [
        "unknown key; data has cache_dir",
        "must be >= 1",
        "unknown key; trainer 'on_policy' has async_save",
        "unknown key; the keys of trainer 'on_policy' are listed above",
    ]


def test_of_very_many_the_first_are_listed_and_the_others_counted(build):
    with pytest.raises(ConfigError) as caught:
        build({"trainer": {f"key_{number}": number for number in range(100, 315)}})
    first, *listed, last = str(caught.value).splitlines()
    assert first == "mapping: 215 problems in the config"
    assert keys(line.strip() for line in listed) == [f"trainer.key_{n}" for n in range(100, 300)]
    assert last == "  … and 15 more: fix these and check again"
    assert len(caught.value.problems) == 215


@attrs.frozen(kw_only=True)
class Served(PluginSection):
    unsupported_keys = {"mode": "its workers are always servers: leave it out"}  # noqa: RUF012
    nodes: int = 1
    """Machines."""


def test_a_plugin_tells_of_keys_that_it_lacks(lookup):
    from dovetail.config import config_from_mapping

    def find(kind, section):
        return Served if kind == "advantage" else lookup(kind, section)

    mapping = {"model": {"path": "x"}, "algorithm": {"advantage": {"name": "grpo", "mode": 1}}}
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(mapping, resolver=find)
    assert caught.value.problems == (
        "algorithm.advantage.mode = 1 (mapping): unknown key; its workers are always servers: leave it out",
    )
