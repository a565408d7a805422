"""What a trainer's config brings for other keys: a layer below all that are given."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from dovetail.config import config_from_mapping
from dovetail.config.serialise import to_mapping
from dovetail.errors import ConfigError
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
class Sixteen(PresetSection):
    def settings(self) -> Any:
        return {"rollout": {"n": 16}}


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
        resolver=lambda kind, _: CLASSES.get(kind, PluginSection),
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


@pytest.mark.parametrize(
    ("brings", "message"),
    [
        ("[1]", "trainer 'ahead' gives [1] for its settings"),
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
