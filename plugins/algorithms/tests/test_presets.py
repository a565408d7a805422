"""Presets: the settings that each preset combines, read through the installed plugins."""

from __future__ import annotations

import pytest

from dovetail.config import config_from_mapping
from dovetail_algorithms import presets
from dovetail_algorithms.config.presets import DapoPresetConfig
from dovetail_sdk.testing.conformance import PresetConformance

PLUGINS = {
    plugin.name: plugin
    for plugin in vars(presets).values()
    if isinstance(plugin, type) and isinstance(getattr(plugin, "name", None), str)
}


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
class TestPresets(PresetConformance):
    @pytest.fixture(autouse=True)
    def _set_plugin(self, plugin, monkeypatch):
        monkeypatch.setattr(type(self), "plugin", plugin, raising=False)


class TestDapoWithEverything(PresetConformance):
    plugin = presets.DapoPreset
    config = DapoPresetConfig(name="dapo", mask_truncated=True, overlong_share=0.5)


def algorithm(preset, *overrides, **sections):
    given = {"model": {"path": "tiny"}, "algorithm": {"preset": preset}, **sections}
    return config_from_mapping(given, overrides).config.algorithm


COMBINATIONS = {
    "ppo": ("gae", "ppo_clip", "token_mean", "k1 in the reward"),
    "grpo": ("grpo", "ppo_clip", "seq_mean_token_mean", "k3 in the loss"),
    "dr_grpo": ("dr_grpo", "ppo_clip", "seq_mean_token_sum_norm", None),
    "dapo": ("grpo", "ppo_clip", "token_mean", None),
    "gspo": ("grpo", "gspo", "seq_mean_token_mean", None),
    "cispo": ("grpo", "cispo", "token_mean", None),
    "sapo": ("grpo", "sapo", "seq_mean_token_mean", None),
    "rloo": ("rloo", "reinforce", "token_mean", "k1 in the reward"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "ppo_clip", "token_mean", "k1 in the reward"),
    "remax": ("remax", "reinforce", "token_mean", "k1 in the reward"),
    "opo": ("opo", "reinforce", "token_mean", None),
    "gpg": ("gpg", "gpg", "token_mean", None),
    "gmpo": ("grpo", "gmpo", "seq_mean_token_mean", None),
}


def test_there_is_a_preset_for_every_name():
    assert PLUGINS.keys() == COMBINATIONS.keys()


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_preset_combines_what_its_paper_does(name):
    found = algorithm(name)
    kl = None
    if found.kl.in_loss:
        kl = f"{found.kl.in_loss.estimator} in the loss"
    if found.kl.in_reward:
        kl = f"{found.kl.in_reward.estimator} in the reward"
    parts = (found.advantage.name, found.policy_loss.name, found.loss_aggregation.name, kl)
    assert parts == COMBINATIONS[name]


def test_ppo_goes_over_a_rollout_several_times():
    given = {"model": {"path": "tiny"}, "algorithm": {"preset": "ppo"}}
    config = config_from_mapping(given).config
    assert (config.actor.epochs, config.critic.value_clip) == (4, 0.2)
    assert config.critic.epochs is None


def test_dr_grpo_divides_by_the_longest_response_allowed():
    found = algorithm("dr_grpo", data={"max_response_length": 77})
    assert found.loss_aggregation.length == 77


def test_dapo_is_whole():
    room = {"max_tokens_per_micro_batch": 30_000}
    found = algorithm("dapo", data={"max_response_length": 20480}, actor=room)
    assert (found.policy_loss.clip_low, found.policy_loss.clip_high) == (0.2, 0.28)
    assert [chosen.name for chosen in found.sample_filters] == ["equal_rewards"]
    assert found.max_generation_rounds == 10
    assert (found.overlong_penalty.buffer, found.overlong_penalty.factor) == (4096, 1.0)


@pytest.mark.parametrize("length", [1, 7, 32, 1024, 1_000_001])
@pytest.mark.parametrize("share", [0.01, 0.2, 1.0])
def test_dapos_penalty_fits_any_response_length(length, share):
    found = algorithm(
        {"name": "dapo", "overlong_share": share}, data={"max_response_length": length},
        actor={"max_tokens_per_micro_batch": 10**7},
    )  # fmt: skip
    assert 1 <= found.overlong_penalty.buffer <= length
    assert abs(found.overlong_penalty.buffer - share * length) <= 1


def test_dapo_may_mask_truncated_responses_and_leave_the_penalty_out():
    found = algorithm({"name": "dapo", "overlong_share": None, "mask_truncated": True})
    assert [chosen.name for chosen in found.sample_filters] == ["equal_rewards", "overlong"]
    assert found.overlong_penalty is None


def test_choosing_another_loss_takes_its_own_clip_not_the_presets():
    found = algorithm("gspo", "algorithm.policy_loss=ppo_clip")
    assert (found.policy_loss.clip_low, found.policy_loss.clip_high) == (0.2, 0.2)
    found = algorithm("gspo", "algorithm.policy_loss.clip_high=5e-4")
    assert (found.policy_loss.name, found.policy_loss.clip_low, found.policy_loss.clip_high) == ("gspo", 3e-4, 5e-4)  # fmt: skip
