"""What a trainer's config brings for other keys: a layer below all that are given."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from dovetail.config import config_from_mapping
from dovetail.config.plain_yaml import parse
from dovetail.config.serialise import dump_yaml, to_mapping
from dovetail.errors import ConfigError
from dovetail.sections import (
    EngineSection,
    EpisodeSection,
    OptimSection,
    PluginSection,
    PresetSection,
    RolloutSection,
    RuntimeSection,
    TrainerSection,
)


@attrs.frozen(kw_only=True)
class AheadConfig(TrainerSection):
    steps: int = 1
    """How far ahead."""
    brings: Any = None
    """What it brings in place of its own."""

    def settings(self) -> Any:
        if self.brings is not None:
            return self.brings
        return {"rollout": {"n": 2, "top_p": 0.5}} if self.steps else {}


@attrs.frozen(kw_only=True)
class QuizConfig(EpisodeSection):
    rows: str = "quiz"
    """Where its rows come from."""
    brings: Any = None
    """What it brings in place of its own."""

    def settings(self) -> Any:
        if self.brings is not None:
            return self.brings
        return {"data": {"train_files": [self.rows]}, "rollout": {"n": 3, "top_k": 7}}


@attrs.frozen(kw_only=True)
class Sixteen(PresetSection):
    top_k: int = 5
    """What it sets besides."""

    def settings(self) -> Any:
        return {"rollout": {"n": 16, "top_k": self.top_k}}


CLASSES = {
    "optimizer": OptimSection,
    "rollout": RolloutSection,
    "engine": EngineSection,
    "trainer": AheadConfig,
    "runtime": RuntimeSection,
    "preset": Sixteen,
}


def load(*overrides: str, **sections: Any) -> Any:
    return config_from_mapping(
        {"model": {"path": "tiny"}, **sections},
        overrides,
        resolver=lambda kind, section: (
            QuizConfig if section.get("name") == "quiz" else CLASSES.get(kind, PluginSection)
        ),
    )


def test_a_trainer_brings_what_nothing_else_gives_and_says_so() -> None:
    loaded = load("trainer.name=ahead")
    assert (loaded.config.rollout.n, loaded.config.rollout.top_p) == (2, 0.5)
    assert loaded.provenance["rollout.n"] == "trainer 'ahead'"
    assert loaded.provenance["rollout.temperature"] == "default"


def test_what_it_brings_depends_on_its_own_settings() -> None:
    assert load("trainer.steps=0").config.rollout.n == RolloutSection(name="hf").n


def test_files_presets_and_overrides_win() -> None:
    assert load(rollout={"n": 4}).config.rollout.n == 4
    assert load("rollout.n=4").config.rollout.n == 4
    preset = load("algorithm.preset=sixteen")
    assert (preset.config.rollout.n, preset.config.rollout.top_p) == (16, 0.5)


def test_a_resolved_config_reads_back_the_same() -> None:
    config = load("trainer.name=ahead", "rollout.n=4").config
    assert load(**to_mapping(config)).config == config


def stored(*overrides: str) -> Any:
    """What a run with these overrides keeps as its config."""
    loaded = load(*overrides)
    return parse(dump_yaml(loaded.config, loaded.from_environment, loaded.given))[0]


@pytest.mark.parametrize("steps", ["trainer.steps=0", "trainer.steps=1"])
@pytest.mark.parametrize(
    "given", ["seed=2", "rollout.n=1", "rollout.n=2", "algorithm.preset=sixteen"]
)
def test_over_the_config_of_a_run_what_was_not_given_for_it_follows_and_the_rest_stays(
    steps: str, given: str
) -> None:
    tree = stored(steps, given)
    assert load(**tree).config == load(steps, given).config
    for other in ("trainer.steps=0", "trainer.steps=1"):
        assert load(other, **tree).config == load(other, given).config
    preset = load("algorithm.preset=sixteen", "rollout.top_k=7", **tree).config.rollout
    assert (preset.n, preset.top_k) == (16, 7)


def test_over_the_config_of_a_run_what_a_preset_sets_follows_its_settings() -> None:
    tree = stored("algorithm.preset=sixteen", "trainer.name=ahead")
    assert load("algorithm.preset.top_k=9", **tree).config.rollout.top_k == 9


def test_what_is_edited_in_the_config_of_a_run_stays_and_so_does_an_earlier_default() -> None:
    tree = stored()
    tree["rollout"] |= {"n": 5, "temperature": 0.25}
    loaded = load("trainer.steps=0", **tree)
    rollout = loaded.config.rollout
    assert (rollout.n, rollout.temperature, rollout.top_p) == (5, 0.25, 1.0)
    assert loaded.given == ("model.path", "rollout.n", "rollout.temperature", "trainer.steps")


@pytest.mark.parametrize("given", [1, ["a..b"], {}, None])
def test_what_names_no_given_keys_is_one_error(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^given = .* expected.*key paths") as error:
        load(**stored() | {"given": given})
    assert error.value.hint


def test_what_is_wrong_in_the_config_of_a_run_is_told_as_in_any_other() -> None:
    tree = stored()
    tree["rollout"] |= {"m": 5, "n": "many"}
    with pytest.raises(ConfigError) as error:
        load(**tree)
    assert [problem.split()[0] for problem in error.value.problems] == ["rollout.n", "rollout.m"]


@pytest.mark.parametrize(
    ("brings", "message"),
    [
        ("[1]", "trainer 'ahead' returned [1]"),
        ("{rollout: {m: 2}}", "rollout.m"),
        ("{rollout: {n: many}}", "trainer 'ahead'"),
    ],
)
def test_what_no_config_may_hold_is_an_error_that_names_the_trainer(
    brings: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load("trainer.name=ahead", f"trainer.brings={brings}")
    assert message in str(error.value)


def test_an_agent_loop_brings_what_neither_the_trainer_nor_the_config_gives() -> None:
    loaded = load("rollout.agent_loop={name: quiz, rows: own}", "trainer.name=ahead")
    assert loaded.config.data.train_files == ("own",)
    assert loaded.provenance["data.train_files[0]"] == "agent_loop 'quiz'"
    assert (loaded.config.rollout.n, loaded.config.rollout.top_k) == (2, 7)
    assert (loaded.provenance["rollout.n"], loaded.provenance["rollout.top_k"]) == (
        "trainer 'ahead'",
        "agent_loop 'quiz'",
    )
    without = load("trainer.steps=0", "rollout.agent_loop=quiz", "data.train_files=[mine]")
    assert (without.config.data.train_files, without.config.rollout.n) == (("mine",), 3)


def test_a_config_with_what_an_agent_loop_brings_reads_back_the_same_and_follows_a_change() -> None:
    tree = stored("rollout.agent_loop={name: quiz, rows: own}")
    assert load(**tree).config.data.train_files == ("own",)
    changed = load("rollout.agent_loop.rows=other", **tree).config
    assert (changed.data.train_files, changed.rollout.top_k) == (("other",), 7)


def test_what_an_agent_loop_brings_has_to_be_settings() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.agent_loop"):
        load(rollout={"agent_loop": {"name": "quiz", "brings": "rows"}})
