"""`algorithm.preset`: a layer directly below the one that names it."""

from __future__ import annotations

import attrs
import pytest

from dovetail.config import config_from_mapping, load_config
from dovetail.config.explain import annotated_yaml, explain
from dovetail.config.plain_yaml import parse
from dovetail.config.serialise import dump_yaml
from dovetail.errors import ConfigError, PluginNotFoundError
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
class SequenceConfig(ClipConfig):
    smooth: bool = False
    """A key of its own."""


@attrs.frozen(kw_only=True)
class NormConfig(PluginSection):
    length: int = 1024
    """Constant."""


@attrs.frozen(kw_only=True)
class SharpPreset(PresetSection):
    width: float = attrs.field(default=0.25, validator=attrs.validators.gt(0))
    """Written to clip_high."""

    def settings(self):
        return {
            "algorithm": {
                "advantage": "rloo",
                "policy_loss": {"name": "sequence", "clip_high": self.width, "smooth": True},
                "loss_aggregation": {"name": "norm", "length": "${data.max_response_length}"},
                "kl": {"in_loss": {"estimator": "k2", "coef": 0.5}},
                "sample_filters": ("equal", {"name": "clip", "clip_low": 0.1}),
                "overlong_penalty": {"buffer": "${share:0.25,${data.max_response_length}}"},
            },
            "actor": {"epochs": 3},
        }


@attrs.frozen(kw_only=True)
class PlainPreset(PresetSection):
    def settings(self):
        return {"algorithm": {"entropy": {"coef": 0.125}}}


def preset_of(settings):
    """A third party's preset that gives those settings."""

    class Theirs(PresetSection):
        def settings(self):
            return settings() if callable(settings) else settings

    return attrs.frozen(kw_only=True)(Theirs)


CLASSES = {
    "optimizer": {"adamw": OptimSection},
    "rollout": {"hf": RolloutSection},
    "engine": {"fsdp2": EngineSection},
    "trainer": {"on_policy": TrainerSection},
    "runtime": {"inline": RuntimeSection},
    "preset": {"sharp": SharpPreset, "plain": PlainPreset},
    "policy_loss": {"ppo_clip": ClipConfig, "sequence": SequenceConfig, "bare": PluginSection},
    "loss_aggregation": {"norm": NormConfig},
    "sample_filter": {"clip": ClipConfig},
}


def resolver(**more):
    def find(kind, section):
        known = CLASSES.get(kind, {}) | (more if kind == "preset" else {})
        if kind == "preset" and section["name"] not in known:
            raise PluginNotFoundError(
                "no preset plugin has that name", hint="did you mean 'sharp'?"
            )
        return known.get(str(section.get("name")).partition("@")[0], PluginSection)

    return find


def build(mapping=None, *overrides, **presets):
    return config_from_mapping(
        {"model": {"path": "tiny"}, **(mapping or {})}, overrides, resolver=resolver(**presets)
    )


def problems(mapping=None, *overrides, **presets):
    with pytest.raises(ConfigError) as caught:
        build(mapping, *overrides, **presets)
    return caught.value.problems


SHARP = "algorithm.preset=sharp"


def test_a_preset_sets_what_nothing_else_gives_and_says_so():
    loaded = build(None, SHARP)
    algorithm = loaded.config.algorithm
    assert algorithm.advantage.name == "rloo"
    assert algorithm.policy_loss == SequenceConfig(name="sequence", clip_high=0.25, smooth=True)
    assert (algorithm.kl.in_loss.estimator, algorithm.kl.in_loss.coef) == ("k2", 0.5)
    assert [section.name for section in algorithm.sample_filters] == ["equal", "clip"]
    assert algorithm.sample_filters[1].clip_low == 0.1
    assert loaded.config.actor.epochs == 3
    origins = {
        "algorithm.preset.name": f"override #1 '{SHARP}'",
        "algorithm.preset.width": "default",
        "algorithm.policy_loss.name": "preset 'sharp'",
        "algorithm.policy_loss.clip_high": "preset 'sharp'",
        "algorithm.policy_loss.clip_low": "default",
        "algorithm.sample_filters[1].clip_low": "preset 'sharp'",
        "algorithm.sample_filters[1].clip_high": "default",
        "algorithm.kl.in_loss.coef": "preset 'sharp'",
        "actor.epochs": "preset 'sharp'",
        "algorithm.entropy.coef": "default",
    }
    assert {key: loaded.provenance[key] for key in origins} == origins
    assert loaded.warnings == ()


def test_every_key_of_a_file_or_an_override_wins():
    loaded = build(
        {
            "algorithm": {"preset": "sharp", "policy_loss": {"clip_high": 0.4}},
            "actor": {"epochs": 1},
        },
        "algorithm.kl.in_loss.coef=0.1",
        "algorithm.sample_filters=[]",
    )
    algorithm = loaded.config.algorithm
    assert (algorithm.policy_loss.name, algorithm.policy_loss.clip_high) == ("sequence", 0.4)
    assert (algorithm.kl.in_loss.estimator, algorithm.kl.in_loss.coef) == ("k2", 0.1)
    assert (loaded.config.actor.epochs, algorithm.sample_filters) == (1, ())
    assert loaded.provenance["actor.epochs"] == "mapping"


def test_the_preset_may_have_settings_of_its_own():
    loaded = build(None, "algorithm.preset={name: sharp, width: 0.75}")
    assert loaded.config.algorithm.policy_loss.clip_high == 0.75
    loaded = build({"seed": 3}, "algorithm.preset.name=sharp", "algorithm.preset.width=${seed}")
    assert loaded.config.algorithm.policy_loss.clip_high == 3.0


def test_interpolations_in_settings_see_the_final_config():
    algorithm = build(None, SHARP, "data.max_response_length=400").config.algorithm
    assert algorithm.loss_aggregation.length == 400
    assert algorithm.overlong_penalty.buffer == 100


def test_the_last_layer_that_names_a_preset_counts_and_null_turns_it_off():
    given = {"algorithm": {"preset": {"name": "sharp", "width": 0.5}}}
    assert build(given, "algorithm.preset=plain").config.algorithm.advantage.name == "grpo"
    assert build(given, "algorithm.preset=plain").config.algorithm.entropy.coef == 0.125
    off = build(given, "algorithm.preset=null")
    assert off.config.algorithm == build().config.algorithm
    again = build(given, "algorithm.preset=null", SHARP)
    assert again.config.algorithm.policy_loss.clip_high == 0.25


@pytest.mark.parametrize("choice", ["ppo_clip", "bare"])
def test_choosing_another_plugin_leaves_nothing_of_what_the_preset_wrote_for_its_own(choice):
    loaded = build(None, SHARP, f"algorithm.policy_loss={choice}")
    assert loaded.config.algorithm.policy_loss == CLASSES["policy_loss"][choice](name=choice)
    assert loaded.provenance["algorithm.policy_loss.name"].startswith("override #2")
    assert loaded.config.algorithm.advantage.name == "rloo"
    assert loaded.warnings == ()


def test_keys_given_besides_another_plugin_are_its_own():
    loss = {"name": "ppo_clip", "clip_low": 0.3}
    loaded = build({"algorithm": {"preset": "sharp", "policy_loss": loss}})
    assert loaded.config.algorithm.policy_loss == ClipConfig(**loss)


@pytest.mark.parametrize(
    "named",
    [
        ("algorithm.policy_loss=sequence",),
        ("algorithm.policy_loss=sequence@acme",),
        ("algorithm.policy_loss=ppo_clip", "algorithm.policy_loss=sequence"),
    ],
)
def test_naming_the_presets_own_plugin_keeps_its_values(named):
    loss = build(None, SHARP, *named).config.algorithm.policy_loss
    assert (loss.clip_high, loss.smooth) == (0.25, True)


def test_an_entry_of_the_presets_list_can_be_replaced():
    filters = build(
        None, SHARP, "algorithm.sample_filters[1]=equal"
    ).config.algorithm.sample_filters
    assert filters == (PluginSection(name="equal"), PluginSection(name="equal"))


def test_an_unknown_preset_names_the_nearest():
    (problem,) = problems(None, "algorithm.preset=shrap")
    assert problem.startswith(
        "algorithm.preset.name = \"shrap\" (override #1 'algorithm.preset=shrap')"
    )
    assert "did you mean 'sharp'?" in problem


def test_wrong_keys_of_the_preset_itself_are_errors_like_any_other():
    assert problems({"algorithm": {"preset": {"name": "sharp", "widht": 1, "width": 0}}}) == (
        "algorithm.preset.width = 0 (mapping): must be > 0",
        "algorithm.preset.widht = 1 (mapping): unknown key; did you mean algorithm.preset.width?",
    )


def test_wrong_settings_name_the_preset_as_their_layer():
    wrong = {
        "algorithm": {"advantgae": "rloo", "policy_loss": {"clip_low": "x"}},
        "actor": {"epochs": 0},
    }
    found = problems(None, "algorithm.preset=theirs", theirs=preset_of(wrong))
    assert sorted(found) == [
        "actor.epochs = 0 (preset 'theirs'): must be >= 1",
        "algorithm.advantgae = \"rloo\" (preset 'theirs'): unknown key; did you mean algorithm.advantage?",
        "algorithm.policy_loss.clip_low = \"x\" (preset 'theirs'): expected float, got text",
    ]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (lambda: 1 / 0, "raised ZeroDivisionError"),
        ([1], "a mapping"),
        ({"actor": {"epochs": {1, 2}}}, "sets actor.epochs to {1, 2}; expected mappings"),
        ({"algorithm": {"preset": "sharp"}}, "sets algorithm.preset; a plugin"),
    ],
)
def test_settings_that_are_no_layer_are_refused(settings, complaint):
    (problem,) = problems(None, "algorithm.preset=theirs", theirs=preset_of(settings))
    assert "algorithm.preset.name" in problem
    assert "preset 'theirs'" in problem
    assert complaint in problem


def test_a_config_that_is_no_presets_is_refused():
    (problem,) = problems(None, "algorithm.preset=theirs", theirs=ClipConfig)
    assert "PresetSection" in problem


def test_a_presets_own_setting_cannot_depend_on_what_it_sets():
    (problem,) = problems(
        None, "algorithm.preset.name=sharp", "algorithm.preset.width=${actor.epochs}"
    )
    assert "preset sets" in problem


@pytest.mark.parametrize(
    "overrides",
    [(SHARP,), (SHARP, "algorithm.policy_loss=ppo_clip"), (SHARP, "algorithm.kl.in_loss=null")],
)
def test_the_resolved_config_reads_back_the_same_and_stays_so_when_resumed(tmp_path, overrides):
    config = build(None, *overrides).config
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config))
    again = load_config(path, resolver=resolver())
    overruled = [text for text in again.warnings if "overrides preset 'sharp'" not in text]
    assert (again.config, overruled) == (config, [])
    resumed = load_config(path, ["actor.epochs=5"], resolver=resolver())
    assert resumed.config == attrs.evolve(config, actor=attrs.evolve(config.actor, epochs=5))
    assert resumed.warnings == again.warnings


def test_explain_says_what_the_preset_would_have_given():
    loaded = build(None, SHARP, "algorithm.policy_loss.clip_high=0.4", "algorithm.advantage=grpo")
    assert explain(loaded, "algorithm.policy_loss.clip_high").preset == "0.25 (preset 'sharp')"
    assert explain(loaded, "algorithm.policy_loss.smooth").preset == ""
    other = build(None, SHARP, "algorithm.policy_loss=ppo_clip")
    assert explain(other, "algorithm.policy_loss.clip_high").preset == ""
    assert explain(other, "algorithm.policy_loss.name").preset == "\"sequence\" (preset 'sharp')"


def test_a_key_of_a_section_that_is_null_can_be_explained():
    explained = explain(build(), "algorithm.kl.in_reward.coef")
    assert explained.value is None
    assert explained.origin == "default: algorithm.kl.in_reward is null"
    assert explained.doc == "Weight of the penalty."


def test_the_shown_yaml_carries_origins_as_comments():
    loaded = build({"seed": 2}, SHARP)
    text = annotated_yaml(loaded)
    assert parse(text)[0] == parse(dump_yaml(loaded.config))[0]
    lines = [line.strip() for line in text.splitlines()]
    assert "seed: 2  # mapping" in lines
    assert "clip_high: 0.25  # preset 'sharp'" in lines
    assert "clip_low: 0.2" in lines
