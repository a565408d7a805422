"""Which layers win over a preset: those that name it and later ones; what goes where it chooses other plugins."""

from __future__ import annotations

import attrs
import pytest

from dovetail.config import config_from_mapping, load_config
from dovetail.config.serialise import dump_yaml
from dovetail.sections import (
    EngineSection,
    OptimSection,
    PluginSection,
    PresetSection,
    RolloutSection,
    RuntimeSection,
    TrainerSection,
)


@attrs.frozen(kw_only=True)
class ClipConfig(PluginSection):
    clip_low: float = 0.2
    """Below one."""
    clip_high: float = 0.2
    """Above one."""


@attrs.frozen(kw_only=True)
class SharpPreset(PresetSection):
    width: float = 0.25
    """Written to clip_high."""

    def settings(self):
        return {
            "algorithm": {
                "advantage": "rloo",
                "policy_loss": {"name": "sequence", "clip_high": self.width},
                "kl": {"in_loss": {"estimator": "k2", "coef": 0.5}},
            },
            "actor": {"epochs": 3},
        }


@attrs.frozen(kw_only=True)
class OtherPreset(PresetSection):
    def settings(self):
        return {
            "algorithm": {"advantage": "rloo", "sample_filters": ["equal"]},
            "actor": {"shuffle": True, "epochs": 2},
        }


BASES = {
    "rollout": RolloutSection,
    "engine": EngineSection,
    "optimizer": OptimSection,
    "trainer": TrainerSection,
    "runtime": RuntimeSection,
}
CLIPPING = ("ppo_clip", "sequence")
SHARP = "algorithm.preset=sharp"


def find_class(kind, section):
    if kind == "preset":
        return {"sharp": SharpPreset, "other": OtherPreset}[section["name"]]
    name = str(section.get("name")).partition("@")[0]
    return ClipConfig if name in CLIPPING else BASES.get(kind, PluginSection)


def build(mapping=None, *overrides):
    given = {"model": {"path": "tiny"}, **(mapping or {})}
    return config_from_mapping(given, overrides, resolver=find_class)


def test_a_preset_named_over_a_resolved_config_takes_effect_and_the_stored_config_says_so(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(build({"algorithm": {"policy_loss": "reinforce"}}).config))
    loaded = load_config(path, [SHARP], resolver=find_class)
    assert loaded.config.algorithm == build(None, SHARP).config.algorithm
    assert loaded.config.actor.epochs == 3
    assert loaded.provenance["algorithm.policy_loss.clip_high"] == "preset 'sharp'"
    path.write_text(dump_yaml(loaded.config))
    again = load_config(path, resolver=find_class)
    assert (again.config, again.warnings) == (loaded.config, ())


def test_of_a_layer_before_the_one_that_names_the_preset_the_preset_wins():
    given = {"algorithm": {"advantage": "grpo", "kl": {"in_loss": {"coef": 0.1}}}, "actor": {"epochs": 2, "grad_clip": 3.0}}  # fmt: skip
    loaded = build(given, SHARP, "algorithm.policy_loss.clip_high=0.3")
    assert loaded.config.algorithm.advantage.name == "rloo"
    assert loaded.config.algorithm.kl.in_loss.coef == 0.5
    assert loaded.config.algorithm.policy_loss.clip_high == 0.3
    assert (loaded.config.actor.epochs, loaded.config.actor.grad_clip) == (3, 3.0)
    assert loaded.provenance["actor.grad_clip"] == "mapping"
    assert loaded.warnings == ()


@pytest.mark.parametrize("named_in", [0, 1, 2])
def test_of_several_files_the_preset_lies_below_the_one_that_names_it(tmp_path, named_in):
    paths = [tmp_path / f"{name}.yaml" for name in "abc"]
    for index, path in enumerate(paths):
        preset = "preset: sharp, " if index == named_in else ""
        key = ["kl: {in_loss: {coef: 0.1}}", "policy_loss: {clip_high: 0.3}", "advantage: gae"][index]  # fmt: skip
        path.write_text(f"model: {{path: x}}\nalgorithm: {{{preset}{key}}}\n")
    algorithm = load_config(paths, resolver=find_class).config.algorithm
    assert algorithm.kl.in_loss.coef == (0.1 if named_in == 0 else 0.5)
    assert algorithm.policy_loss.clip_high == (0.3 if named_in <= 1 else 0.25)
    assert algorithm.advantage.name == "gae"


def test_what_was_written_for_another_plugin_than_the_presets_goes_known_or_not():
    loss = {"name": "ppo_clip", "clip_low": 0.1, "clip_high": 0.3}
    loaded = build({"algorithm": {"policy_loss": loss}}, SHARP)
    assert loaded.config.algorithm == build(None, SHARP).config.algorithm
    (dropped,) = loaded.warnings
    assert dropped.startswith("algorithm.policy_loss.clip_low = 0.1 (mapping): dropped: ")
    assert dropped.endswith("chosen by preset 'sharp', is meant to be used without it")
    loaded = build({"algorithm": {"policy_loss": {"kind": 1}}}, SHARP)
    (dropped,) = loaded.warnings
    assert dropped.startswith("algorithm.policy_loss.kind = 1 (mapping): dropped: ")
    assert dropped.endswith("has no such key")


@pytest.mark.parametrize("name", ["sequence", "sequence@acme"])
def test_what_was_written_for_the_presets_own_plugin_stays_where_the_preset_is_silent(name):
    given = {"algorithm": {"policy_loss": {"name": name, "clip_low": 0.1, "clip_high": 0.3}}}
    loaded = build(given, SHARP)
    loss = loaded.config.algorithm.policy_loss
    assert (loss.clip_low, loss.clip_high, loaded.warnings) == (0.1, 0.25, ())


def test_a_plugin_chosen_after_the_preset_keeps_what_a_file_wrote_for_it():
    given = {"algorithm": {"policy_loss": {"name": "ppo_clip", "clip_low": 0.1}}}
    loaded = build(given, SHARP, "algorithm.policy_loss=ppo_clip")
    assert loaded.config.algorithm.policy_loss == ClipConfig(name="ppo_clip", clip_low=0.1)


def test_a_file_that_overrules_the_plugins_of_its_own_preset_is_warned_about(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {path: x}\nalgorithm:\n  preset: sharp\n  advantage: rloo\n  policy_loss: ppo_clip\n"
    )
    loaded = load_config(path, resolver=find_class)
    assert loaded.config.algorithm.policy_loss.name == "ppo_clip"
    (warning,) = loaded.warnings
    assert warning.startswith(
        f'algorithm.policy_loss.name = "ppo_clip" ({path}:5): overrides preset \'sharp\' ({path}:3), which sets "sequence"'
    )
    assert load_config(path, [SHARP], resolver=find_class).warnings == ()
    assert load_config(path, ["algorithm.policy_loss=bare"], resolver=find_class).warnings == ()


def test_settings_of_the_preset_alone_do_not_name_it_and_say_so_where_they_change_nothing(tmp_path):
    given = {"algorithm": {"preset": "sharp", "policy_loss": {"clip_low": 0.1}}}
    loaded = build(given, "algorithm.preset.width=0.5")
    loss = loaded.config.algorithm.policy_loss
    assert (loss.clip_low, loss.clip_high, loaded.warnings) == (0.1, 0.5, ())
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(loaded.config))
    again = load_config(path, ["algorithm.preset.width=0.75"], resolver=find_class)
    assert again.config.algorithm.policy_loss == loss
    (warning,) = again.warnings
    assert warning.startswith("algorithm.preset (override #1 'algorithm.preset.width=0.75')")
    assert "settings have no effect" in warning


def test_what_stays_of_another_preset_that_was_named_before_is_told(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(build(None, "algorithm.preset=other").config))
    loaded = load_config(path, [SHARP, "actor.shuffle=false"], resolver=find_class)
    assert [section.name for section in loaded.config.algorithm.sample_filters] == ["equal"]
    (warning,) = loaded.warnings
    assert warning.startswith(f"preset 'sharp' (override #1 '{SHARP}') replaces another preset")
    assert "does not set algorithm.sample_filters:" in warning
    named_only = build({"algorithm": {"preset": "other"}}, SHARP)
    assert named_only.config.algorithm.sample_filters == ()
    assert named_only.warnings == ()
